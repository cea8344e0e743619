// What a rank does for those that ask it for rows: finds the keys in their messages, and puts the rows
// together for each.

#include <algorithm>
#include <string>
#include <vector>

#include "arrival.h"
#include "errors.h"
#include "kernel.h"
#include "kernel_threads.h"
#include "kvtable/convert_elements.h"
#include "kvtable/exchange_agreement.h"
#include "kvtable/exchange_message.h"
#include "reply_error.h"
#include "reply_layout.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelConstruction;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

template <class Key>
void CopyKeys(const int64_t* from, int64_t n, int64_t divisor, Key* to) {
  if (divisor == 1) {
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<Key>(from[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<Key>(from[i] / divisor);
  }
}

class ServeOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    TF_RETURN_IF_ERROR(ReadAttrs(ctx, "ranks", &ranks_, "local", &local_, "Tout", &dtypes_));
    if (local_.size() == dtypes_.size()) return absl::OkStatus();
    return errors::InvalidArgument("each list of attributes must have ", dtypes_.size(), " entries");
  }

  absl::Status Work(OpKernelContext* ctx) override {
    std::vector<kvtable::AskedKeys> asked;
    TF_RETURN_IF_ERROR(Read(ctx->input(0), ctx->input(1), &asked));
    const size_t tables = dtypes_.size();
    Tensor* counts = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(static_cast<int>(tables),
                                            TensorShape({ranks_, static_cast<int64_t>(tables)}), &counts));
    std::vector<Tensor*> keys(tables);
    for (size_t t = 0; t < tables; ++t) {
      int64_t total = 0;
      for (int64_t r = 0; r < ranks_; ++r) {
        const int64_t count = asked[static_cast<size_t>(r)].counts[t];
        counts->matrix<int64_t>()(r, static_cast<int64_t>(t)) = count;
        total += count;
      }
      TF_RETURN_IF_ERROR(ctx->allocate_output(static_cast<int>(t), TensorShape({total}), &keys[t]));
    }
    std::vector<int64_t> written(tables);
    for (const kvtable::AskedKeys& one : asked) {
      const int64_t* from = one.keys;
      for (size_t t = 0; t < tables; ++t) {
        Copy(from, one.counts[t], local_[t] ? ranks_ : 1, keys[t], written[t]);
        from += one.counts[t];
        written[t] += one.counts[t];
      }
    }
    return absl::OkStatus();
  }

 private:
  // The messages of all ranks; InvalidArgument where one has sent an error, or no message at all, or looks up
  // something else.
  absl::Status Read(const Tensor& message, const Tensor& splits,
                    std::vector<kvtable::AskedKeys>* asked) const {
    if (message.dims() != 1 || splits.dims() != 1 || splits.NumElements() != ranks_) {
      return errors::InvalidArgument("got messages of shape ", message.shape().DebugString(),
                                     " and splits of ", splits.shape().DebugString(), ", expected those of ",
                                     ranks_, " ranks");
    }
    std::string failed;
    int failures = 0;
    int64_t begin = 0;
    for (int64_t r = 0; r < ranks_; ++r) {
      const int64_t words = splits.vec<int32_t>()(r);
      if (words < 0 || begin + words > message.NumElements()) {
        return errors::InvalidArgument("the splits are of more than the ", message.NumElements(),
                                       " words that came");
      }
      try {
        asked->push_back(kvtable::ReadKeysMessage(message.vec<int64_t>().data() + begin, words));
      } catch (const kvtable::Error& error) {
        return errors::InvalidArgument("rank ", r, ": ", error.what());
      }
      const kvtable::AskedKeys& one = asked->back();
      if (!one.error.empty()) {
        absl::StrAppend(&failed, failures == 0 ? "" : " | ", one.error);
        ++failures;
      }
      if (!one.text.empty()) kvtable::RememberLookup(one.lookup, one.text);
      begin += words;
    }
    if (failures == 0) return CheckAllTheSame(*asked);
    return errors::InvalidArgument("the lookup failed on ", failures, " of ", ranks_,
                                   ranks_ == 1 ? " rank" : " ranks", ", so on none it is done. ", failed);
  }

  absl::Status CheckAllTheSame(const std::vector<kvtable::AskedKeys>& asked) const {
    std::vector<uint64_t> lookups;
    for (const kvtable::AskedKeys& one : asked) lookups.push_back(one.lookup);
    const std::string difference = kvtable::DifferenceOfLookups(lookups);
    if (!difference.empty()) {
      return errors::InvalidArgument("the ranks do not look up the same, so on none it is done: ", difference,
                                     ". All ranks must look up the same tables in the same order.");
    }
    for (const kvtable::AskedKeys& one : asked) {
      if (one.tables != static_cast<int64_t>(dtypes_.size())) {
        return errors::InvalidArgument("the messages are of ", one.tables, " tables, expected ",
                                       dtypes_.size());
      }
    }
    return absl::OkStatus();
  }

  static void Copy(const int64_t* from, int64_t n, int64_t divisor, Tensor* keys, int64_t at) {
    switch (keys->dtype()) {
      case tf::DT_INT32:
        return CopyKeys(from, n, divisor, static_cast<int32_t*>(keys->data()) + at);
      case tf::DT_UINT64:
        return CopyKeys(from, n, divisor, static_cast<uint64_t*>(keys->data()) + at);
      default:
        return CopyKeys(from, n, divisor, static_cast<int64_t*>(keys->data()) + at);
    }
  }

  int64_t ranks_ = 1;
  std::vector<bool> local_;
  tf::DataTypeVector dtypes_;
};

class ReplyOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override { return types_.Read(ctx); }

  absl::Status Work(OpKernelContext* ctx) override {
    tf::OpInputList rows;
    TF_RETURN_IF_ERROR(ctx->input_list("rows", &rows));
    ReplyLayout layout;
    TF_RETURN_IF_ERROR(layout.Find(ctx->input(rows.size()), types_.dims));
    for (int t = 0; t < rows.size(); ++t) {
      const int64_t expected = layout.table_elements[static_cast<size_t>(t)];
      if (rows[t].NumElements() != expected) {
        return errors::InvalidArgument("rows of table ", t, " are of shape ", rows[t].shape().DebugString(),
                                       ", expected ", expected, " elements");
      }
    }
    Tensor* flat = nullptr;
    TF_RETURN_IF_ERROR(layout.Allocate(ctx, &flat));
    layout.ForEachPiece(ctx, [&](const ReplyLayout::Piece& piece) {
      kvtable::ConvertElements(
          types_.rows,
          static_cast<const char*>(rows[piece.table].data()) + piece.in_rows * kvtable::SizeOf(types_.rows),
          piece.elements, types_.flat,
          static_cast<char*>(flat->data()) + piece.in_flat * kvtable::SizeOf(types_.flat));
    });
    return absl::OkStatus();
  }

 private:
  ReplyTypes types_;
};

class ReplyGradientOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override { return types_.Read(ctx); }

  absl::Status Work(OpKernelContext* ctx) override {
    Received flat;
    TF_RETURN_IF_ERROR(flat.Read(ctx->input(0)));
    ReplyLayout layout;
    TF_RETURN_IF_ERROR(layout.Find(ctx->input(1), types_.dims));
    const int64_t size = kvtable::SizeOf(types_.flat);
    if (tf::DataTypeSize(flat.dtype) != size || flat.elements() != layout.total) {
      return errors::InvalidArgument("gradients are ", flat.elements(), " of ",
                                     tf::DataTypeString(flat.dtype), ", expected ", layout.total,
                                     " elements of ", size, " bytes");
    }
    std::vector<const char*> of_rank;  // where those that each rank sent begin, had all been sent before
    int64_t before = 0;
    for (size_t r = 0; r < layout.rank_elements.size(); ++r) {
      const int64_t expected = layout.rank_elements[r] * size;
      if (!flat.in_place) {
        of_rank.push_back(flat.pieces[0].data);
        continue;
      }
      if (r >= flat.pieces.size() || flat.pieces[r].bytes != expected) {
        return errors::InvalidArgument("rank ", r, " sent other gradients than it got rows");
      }
      of_rank.push_back(flat.pieces[r].data - before);
      before += expected;
    }
    std::vector<Tensor*> rows(types_.dims.size());
    for (size_t t = 0; t < types_.dims.size(); ++t) {
      TF_RETURN_IF_ERROR(ctx->allocate_output(
          static_cast<int>(t), TensorShape({layout.table_elements[t] / types_.dims[t], types_.dims[t]}),
          &rows[t]));
    }
    layout.ForEachPiece(ctx, [&](const ReplyLayout::Piece& piece) {
      kvtable::ConvertElements(types_.flat, of_rank[static_cast<size_t>(piece.rank)] + piece.in_flat * size,
                               piece.elements, types_.rows,
                               static_cast<char*>(rows[static_cast<size_t>(piece.table)]->data()) +
                                   piece.in_rows * kvtable::SizeOf(types_.rows));
    });
    return absl::OkStatus();
  }

 private:
  ReplyTypes types_;
};

// What goes to all ranks: rows, or, where looking them up brought an error, that.
class TellOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    return ReadAttrs(ctx, "dims", &dims_, "Tflat", &type_);
  }

  absl::Status Work(OpKernelContext* ctx) override {
    ReplyLayout layout;
    TF_RETURN_IF_ERROR(layout.Find(ctx->input(2), dims_));
    for (int i = 3; i < ctx->num_inputs(); ++i) {
      if (ctx->input(i).NumElements() != 1) return errors::InvalidArgument("an error must be one string");
      const std::string& error = ctx->input(i).flat<tf::tstring>()(0);
      if (!error.empty()) return SendError(ctx, layout.rank_elements, type_, error);
    }
    ctx->set_output(0, ctx->input(0));
    ctx->set_output(1, ctx->input(1));
    return absl::OkStatus();
  }

 private:
  std::vector<int64_t> dims_;
  tf::DataType type_;
};

// Whether what came are the rows that this rank asked for: the status of the first rank that sent an error.
class CheckOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override { return ReadAttrs(ctx, "dims", &dims_); }

  absl::Status Work(OpKernelContext* ctx) override {
    const Tensor &message = ctx->input(0), &words = ctx->input(1), &came = ctx->input(3);
    const int64_t ranks = words.NumElements();
    if (came.NumElements() != ranks) {
      return errors::InvalidArgument("there are splits of ", ranks, " and of ", came.NumElements(), " ranks");
    }
    Received flat;
    TF_RETURN_IF_ERROR(flat.Read(ctx->input(2)));
    const int64_t element = tf::DataTypeSize(flat.dtype), elements = flat.elements();
    if (flat.in_place && static_cast<int64_t>(flat.pieces.size()) != ranks) {
      return errors::InvalidArgument("there are splits of ", ranks, " ranks, and ", flat.pieces.size(),
                                     " sent");
    }
    absl::StatusCode code = absl::StatusCode::kOk;
    std::string failed;
    int64_t failures = 0, asked_at = 0, came_at = 0;
    for (int64_t r = 0; r < ranks; ++r) {
      const int64_t asked = words.flat<int32_t>()(r), size = came.flat<int32_t>()(r);
      if (asked < 0 || size < 0 || asked_at + asked > message.NumElements() || came_at + size > elements ||
          (flat.in_place && flat.pieces[static_cast<size_t>(r)].bytes != size * element)) {
        return errors::InvalidArgument("the splits are of more than there is");
      }
      const kvtable::AskedKeys keys =
          kvtable::ReadKeysMessage(message.flat<int64_t>().data() + asked_at, asked);
      if (keys.tables != static_cast<int64_t>(dims_.size())) {
        return errors::InvalidArgument("the message is of ", keys.tables, " tables, expected ", dims_.size());
      }
      int64_t expected = 0;
      for (size_t t = 0; t < dims_.size(); ++t) expected += keys.counts[t] * dims_[t];
      if (size != expected) {
        const char* const sent = flat.in_place ? flat.pieces[static_cast<size_t>(r)].data
                                               : flat.pieces[0].data + came_at * element;
        const absl::Status status = ReadError(sent, size * element);
        absl::StrAppend(&failed, failures == 0 ? "" : " | ", "rank ", r, ": ", status.message());
        if (failures++ == 0) code = status.code();
      }
      asked_at += asked;
      came_at += size;
    }
    if (failures == 0) return absl::OkStatus();
    return absl::Status(code, absl::StrCat("the lookup failed on ", failures, " of ", ranks,
                                           " ranks, so none has its rows. ", failed));
  }

 private:
  std::vector<int64_t> dims_;
};

KVTOOLS_REGISTER(Name("KvExchangeTell")
                     .HostMemory("rows")
                     .HostMemory("row_splits")
                     .HostMemory("counts")
                     .HostMemory("errors")
                     .HostMemory("flat")
                     .HostMemory("splits"),
                 TellOp);
KVTOOLS_REGISTER(Name("KvExchangeCheck")
                     .HostMemory("message")
                     .HostMemory("message_splits")
                     .HostMemory("flat")
                     .HostMemory("splits"),
                 CheckOp);
KVTOOLS_REGISTER(Name("KvExchangeServe")
                     .HostMemory("message")
                     .HostMemory("splits")
                     .HostMemory("keys")
                     .HostMemory("counts"),
                 ServeOp);
KVTOOLS_REGISTER(
    Name("KvExchangeReply").HostMemory("rows").HostMemory("counts").HostMemory("flat").HostMemory("splits"),
    ReplyOp);
KVTOOLS_REGISTER(Name("KvExchangeReplyGradient").HostMemory("flat").HostMemory("counts").HostMemory("rows"),
                 ReplyGradientOp);

}  // namespace
}  // namespace kvtools
