// The message in which a rank asks the others for rows.

#include <algorithm>
#include <limits>
#include <new>
#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "catch_errors.h"
#include "current_exchange.h"
#include "errors.h"
#include "kernel.h"
#include "kernel_threads.h"
#include "kvtable/distinct_by_part.h"
#include "kvtable/exchange_agreement.h"
#include "kvtable/exchange_message.h"
#include "segments.h"
#include "table_resource.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelConstruction;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

// Of what Horovod sends to one rank at a time: its splits are int32.
constexpr int64_t kMostElements = std::numeric_limits<int32_t>::max();

// Calls visit(typed pointer to the ids, n).
template <class Visit>
void VisitIds(const Tensor& ids, const Visit& visit) {
  switch (ids.dtype()) {
    case tf::DT_INT32:
      return visit(static_cast<const int32_t*>(ids.data()), ids.NumElements());
    case tf::DT_UINT64:
      return visit(static_cast<const uint64_t*>(ids.data()), ids.NumElements());
    default:
      return visit(static_cast<const int64_t*>(ids.data()), ids.NumElements());
  }
}

// What is wrong with the first id that is not in [low, high]; empty where there is none. `high` as uint64,
// since it may be that of uint64.
std::string FindOutside(const Tensor& ids, int64_t low, uint64_t high) {
  std::string found;
  VisitIds(ids, [&](const auto* values, int64_t n) {
    using Id = std::decay_t<decltype(*values)>;
    const auto outside = [low, high](Id id) {
      if constexpr (std::is_signed_v<Id>) {
        return id < low || (id >= 0 && static_cast<uint64_t>(id) > high);
      } else {
        return id > high || (low > 0 && id < static_cast<uint64_t>(low));
      }
    };
    const auto* const at = std::find_if(values, values + n, outside);
    if (at != values + n) found = absl::StrCat("got ", *at, ", at place ", at - values, " of its ids");
  });
  return found;
}

class RequestOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    int tables;
    TF_RETURN_IF_ERROR(ReadAttrs(ctx, "rank", &rank_, "ranks", &ranks_, "names", &names_, "owners", &owners_,
                                 "rows", &rows_, "key_dtypes", &key_dtypes_, "dims", &dims_, "hotness",
                                 &hotness_, "outer", &outer_, "weighted", &weighted_, "lookup", &lookup_, "T",
                                 &tables));
    lookup_hash_ = kvtable::HashOfLookup(lookup_);
    const size_t wanted = static_cast<size_t>(tables);
    if (names_.size() != wanted || owners_.size() != wanted || rows_.size() != wanted ||
        key_dtypes_.size() != wanted || dims_.size() != wanted || hotness_.size() != wanted ||
        outer_.size() != wanted || weighted_.size() != wanted ||
        static_cast<size_t>(num_inputs()) < 2 * wanted) {
      return errors::InvalidArgument("each list of attributes must have ", tables, " entries");
    }
    for (int64_t owner : owners_) {
      if (owner >= ranks_) {
        return errors::InvalidArgument("owner ", owner, " is none of ", ranks_, " ranks");
      }
    }
    return absl::OkStatus();
  }

  absl::Status Work(OpKernelContext* ctx) override {
    KernelThreads threads(ctx);
    tf::OpInputList ids;
    TF_RETURN_IF_ERROR(ctx->input_list("ids", &ids));
    std::vector<int64_t*> places;
    for (int t = 0; t < ids.size(); ++t) {
      Tensor* out = nullptr;
      TF_RETURN_IF_ERROR(ctx->allocate_output(2 + t, ids[t].shape(), &out));
      places.push_back(static_cast<int64_t*>(out->data()));
    }
    const std::string error = WhatIsWrong(ctx, ids, &threads);
    if (!error.empty()) return SendError(ctx, error);
    // The other ranks wait for a message, whatever happens here.
    const absl::Status sent =
        CatchErrors("asking for rows of", names_[0], [&] { return SendKeys(ctx, ids, places, &threads); });
    return sent.ok() ? sent : SendError(ctx, std::string(sent.message()));
  }

 private:
  int64_t tables() const { return static_cast<int64_t>(names_.size()); }

  std::string WhatIsWrong(OpKernelContext* ctx, const tf::OpInputList& ids, kvtable::ParallelFor* threads) {
    tf::OpInputList segments, shapes, weights, weight_segments;
    absl::Status read = ctx->input_list("segments", &segments);
    read.Update(ctx->input_list("shapes", &shapes));
    read.Update(ctx->input_list("weights", &weights));
    read.Update(ctx->input_list("weight_segments", &weight_segments));
    if (!read.ok()) return std::string(read.message());
    std::vector<std::string> errors(names_.size());
    std::vector<const Tensor*> shape_of(names_.size()), weights_of(names_.size()),
        weight_segments_of(names_.size());
    int next_shape = 0, next_weights = 0;
    for (size_t t = 0; t < names_.size(); ++t) {
      if (outer_[t] >= 0 && next_shape < shapes.size()) shape_of[t] = &shapes[next_shape++];
      if (weighted_[t] && next_weights < weights.size()) {
        if (next_weights < weight_segments.size()) weight_segments_of[t] = &weight_segments[next_weights];
        weights_of[t] = &weights[next_weights++];
      }
    }
    threads->Run(tables(), [&](int64_t table) {
      const size_t t = static_cast<size_t>(table);
      const int i = static_cast<int>(table);
      errors[t] = WhatIsWrongIn(t, ids[i], segments[i], shape_of[t], weights_of[t], weight_segments_of[t]);
    });
    std::string all;
    for (size_t t = 0; t < names_.size(); ++t) {
      if (errors[t].empty()) continue;
      absl::StrAppend(&all, all.empty() ? "" : "; ", "'", names_[t], "': ", errors[t]);
    }
    return all;
  }

  // Where ids and weights lie in other rows, or in other places of them; empty where they do not.
  static std::string WhereApart(const Tensor& ids, const Tensor& weights, bool ragged) {
    const auto of_ids = ids.flat<int64_t>(), of_weights = weights.flat<int64_t>();
    const int64_t n = of_ids.size();
    if (of_ids.data() == of_weights.data() && n == of_weights.size()) return "";
    if (!ragged && ids.dims() != 2) return "";  // the ids themselves are told of
    if (ragged && n != of_weights.size()) {
      return absl::StrCat("ids have ", n - 1, " rows, weights ", of_weights.size() - 1);
    }
    if (ids.shape() != weights.shape()) {
      return absl::StrCat("ids have indices of shape ", ids.shape().DebugString(), ", weights of ",
                          weights.shape().DebugString());
    }
    for (int64_t i = 0; i < n; ++i) {
      if (of_ids(i) == of_weights(i)) continue;
      if (ragged) {
        const int64_t row = std::max<int64_t>(0, i - 1);
        return absl::StrCat("row ", row, " has ", of_ids(i) - of_ids(row), " ids and ",
                            of_weights(i) - of_weights(row), " weights");
      }
      const int64_t width = ids.dim_size(1), place = i / width;
      const auto index = [&](const auto& flat) {
        return absl::StrCat(
            "[", absl::StrJoin(flat.data() + place * width, flat.data() + (place + 1) * width, ", "), "]");
      };
      return absl::StrCat("the id at place ", place, " has index ", index(of_ids), ", its weight ",
                          index(of_weights));
    }
    return "";
  }

  std::string WhatIsWrongIn(size_t t, const Tensor& ids, const Tensor& segments, const Tensor* shape,
                            const Tensor* weights, const Tensor* weight_segments) const {
    if (weights != nullptr && weights->NumElements() != ids.NumElements()) {
      return absl::StrCat("got ", ids.NumElements(), " ids and ", weights->NumElements(), " weights");
    }
    if (weights != nullptr && weight_segments != nullptr) {
      const std::string apart = WhereApart(segments, *weight_segments, shape == nullptr);
      if (!apart.empty()) return absl::StrCat("weights are of another shape than the ids: ", apart);
    }
    if (rows_[t] >= 0) {
      const std::string outside =
          rows_[t] == 0 && ids.NumElements() > 0
              ? absl::StrCat("got ", ids.NumElements(), " ids")
              : FindOutside(ids, 0, static_cast<uint64_t>(std::max<int64_t>(0, rows_[t] - 1)));
      if (!outside.empty()) {
        return absl::StrCat("ids must be row numbers from 0 to ", rows_[t] - 1, ", ", outside);
      }
    } else if (ids.dtype() != key_dtypes_[t]) {
      const std::string outside = FindOutsideKeys(ids, key_dtypes_[t]);
      if (!outside.empty()) {
        return absl::StrCat("its keys are ", tf::DataTypeString(key_dtypes_[t]), ", ", outside);
      }
    }
    kvtable::BagsInput in;
    in.key_type = ToKeyType(ids.dtype());
    in.keys = ids.data();
    in.n = ids.NumElements();
    const absl::Status read = ReadSegments(segments, shape, outer_[t], &in);
    if (!read.ok()) return std::string(read.message());
    try {
      const kvtable::Bags bags(in);
      for (int64_t b = 0; hotness_[t] >= 0 && b < bags.size(); ++b) {
        const int64_t found = bags.end(b) - bags.begin(b);
        if (found > hotness_[t]) {
          return absl::StrCat("row ", b, " has ", found, " ids, expected at most its hotness, ", hotness_[t]);
        }
      }
    } catch (const kvtable::Error& error) {
      return error.what();
    } catch (const std::bad_alloc&) {
      return absl::StrCat("there is no memory for the ", in.bags, " rows of its ", in.n, " ids");
    }
    return "";
  }

  static std::string FindOutsideKeys(const Tensor& ids, tf::DataType key_dtype) {
    switch (key_dtype) {
      case tf::DT_INT32:
        return FindOutside(ids, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max());
      case tf::DT_UINT64:
        return FindOutside(ids, 0, std::numeric_limits<uint64_t>::max());
      default:
        return FindOutside(ids, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max());
    }
  }

  absl::Status SendError(OpKernelContext* ctx, const std::string& error) {
    const std::vector<int64_t> message =
        kvtable::ErrorMessage(absl::StrCat("rank ", rank_, ": ", error), tables());
    const int64_t words = static_cast<int64_t>(message.size());
    for (int i : {0, 1}) delete ctx->release_output(i).tensor;  // what a failure has left
    Tensor *out = nullptr, *splits = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({words * ranks_}), &out));
    TF_RETURN_IF_ERROR(ctx->allocate_output(1, TensorShape({ranks_}), &splits));
    for (int64_t r = 0; r < ranks_; ++r) {
      std::copy(message.begin(), message.end(), static_cast<int64_t*>(out->data()) + r * words);
      static_cast<int32_t*>(splits->data())[r] = static_cast<int32_t>(words);
    }
    for (int t = 0; t < static_cast<int>(tables()); ++t) {
      Tensor* const places = ctx->mutable_output(2 + t);
      std::fill_n(static_cast<int64_t*>(places->data()), places->NumElements(), int64_t{0});
    }
    return absl::OkStatus();
  }

  absl::Status SendKeys(OpKernelContext* ctx, const tf::OpInputList& ids, const std::vector<int64_t*>& places,
                        kvtable::ParallelFor* threads) {
    std::vector<kvtable::KeyBatch> batches;
    for (int t = 0; t < ids.size(); ++t) {
      const bool shared = owners_[static_cast<size_t>(t)] < 0;
      batches.push_back(
          {ToKeyType(ids[t].dtype()), ids[t].data(), ids[t].NumElements(), shared ? ranks_ : 1});
    }
    const kvtable::DistinctByPart distinct(batches, *threads);
    // By rank: how many keys of each table it owns, and what comes and goes.
    std::vector<std::vector<int64_t>> counts(static_cast<size_t>(ranks_),
                                             std::vector<int64_t>(names_.size()));
    const std::string text = kvtable::IsKnownLookup(lookup_hash_) ? "" : lookup_;
    const auto words_of = [&](int64_t keys) {
      return kvtable::KeysMessageWords(tables(), keys, static_cast<int64_t>(text.size()));
    };
    int64_t words = 0;
    for (int64_t r = 0; r < ranks_; ++r) {
      int64_t keys = 0, elements = 0;
      for (size_t t = 0; t < names_.size(); ++t) {
        const bool has = owners_[t] < 0 || owners_[t] == r;
        const int64_t count = has ? distinct.count(t, owners_[t] < 0 ? r : 0) : 0;
        counts[static_cast<size_t>(r)][t] = count;
        keys += count;
        elements += count * dims_[t];
      }
      if (std::max(elements, words_of(keys)) > kMostElements) {
        return SendError(ctx, absl::StrCat("its ids ask rank ", r, " for ", keys, " keys and ", elements,
                                           " elements of rows, and an exchange takes at most ", kMostElements,
                                           ": split the batch"));
      }
      words += words_of(keys);
    }
    Tensor *message = nullptr, *splits = nullptr;
    TF_RETURN_IF_ERROR(AllocateToSend(ctx, 0, TensorShape({words}), &message));
    TF_RETURN_IF_ERROR(ctx->allocate_output(1, TensorShape({ranks_}), &splits));
    std::vector<std::vector<kvtable::DistinctByPart::Share>> shares(names_.size());
    int64_t* next = static_cast<int64_t*>(message->data());
    int64_t place = 0;
    for (int64_t r = 0; r < ranks_; ++r) {
      const std::vector<int64_t>& of_rank = counts[static_cast<size_t>(r)];
      int64_t* const begin = next;
      next = kvtable::WriteKeysHeader(of_rank, lookup_hash_, text, begin);
      for (size_t t = 0; t < names_.size(); ++t) {
        if (owners_[t] >= 0 && owners_[t] != r) continue;
        shares[t].push_back({next, place, dims_[t]});
        next += of_rank[t];
        place += of_rank[t] * dims_[t];
      }
      static_cast<int32_t*>(splits->data())[r] = static_cast<int32_t>(next - begin);
    }
    distinct.Write(shares, places, *threads);
    return absl::OkStatus();
  }

  int64_t rank_ = 0;
  int64_t ranks_ = 1;
  std::vector<std::string> names_;
  std::vector<int64_t> owners_;
  std::vector<int64_t> rows_;
  tf::DataTypeVector key_dtypes_;
  std::vector<int64_t> dims_;
  std::vector<int64_t> hotness_;
  std::vector<int64_t> outer_;
  std::vector<bool> weighted_;
  std::string lookup_;
  uint64_t lookup_hash_ = 0;
};

KVTOOLS_REGISTER(Name("KvExchangeRequest")
                     .HostMemory("ids")
                     .HostMemory("segments")
                     .HostMemory("shapes")
                     .HostMemory("weights")
                     .HostMemory("message")
                     .HostMemory("splits")
                     .HostMemory("places"),
                 RequestOp);

}  // namespace
}  // namespace kvtools
