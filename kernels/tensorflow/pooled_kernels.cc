// Pooled lookups in one op, and their gradients.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "errors.h"
#include "kernel_threads.h"
#include "kvtable/device_table_view.h"
#include "kvtable/pool_rows.h"
#include "kvtable/sum_by_key.h"
#include "pooled_kernel.h"
#include "table_list.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelConstruction;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

// What the three kernels share: the attributes of tables, and of ids that are keys.
class PoolOpBase : public PooledKernel {
 public:
  using PooledKernel::PooledKernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    TF_RETURN_IF_ERROR(attrs_.Read(ctx));
    TF_RETURN_IF_ERROR(ReadAttrs(ctx, "positive", &positive_, "filled", &filled_, "Tkeys", &key_dtype_));
    TF_RETURN_IF_ERROR(CheckEntries(positive_.size(), attrs_.tables()));
    TF_RETURN_IF_ERROR(CheckEntries(filled_.size(), attrs_.tables()));
    return PooledKernel::SetUp(ctx);
  }

  absl::Status MakeBags(OpKernelContext* ctx, kvtable::ParallelFor* threads,
                        std::vector<std::unique_ptr<kvtable::Bags>>* bags) const {
    return PooledKernel::MakeBags(ctx, "keys", ToKeyType(key_dtype_), threads, bags);
  }

  absl::Status Complete(OpKernelContext* ctx, size_t t, kvtable::BagsInput* in) const override {
    in->positive_only = weighted_[t] && positive_[t];
    if (!filled_[t]) return absl::OkStatus();
    tf::OpInputList fill_keys;
    TF_RETURN_IF_ERROR(ctx->input_list("fill_keys", &fill_keys));
    const auto own =
        static_cast<int>(std::count(filled_.begin(), filled_.begin() + static_cast<std::ptrdiff_t>(t), true));
    if (own >= fill_keys.size() || fill_keys[own].NumElements() != 1) {
      return errors::InvalidArgument("default_id must be one key");
    }
    in->fill_key = fill_keys[own].data();
    return absl::OkStatus();
  }

  TableListAttrs attrs_;
  std::vector<bool> positive_;
  std::vector<bool> filled_;
  tf::DataType key_dtype_;
};

size_t RowBytes(const kvtable::TableParts& parts) {
  return static_cast<size_t>(parts[0]->dim() * kvtable::SizeOf(parts[0]->value_type()));
}

// The ids of one lookup in a GPU's memory. They come by way of the host, where they are checked and put into
// bags; rows never do, but those of variables in several parts.
class BagsOnGpu {
 public:
  BagsOnGpu(kvtable::DeviceWork* work, kvtable::DeviceStream stream, const kvtable::Bags& bags,
            kvtable::Combiner combiner) {
    const size_t ids = static_cast<size_t>(bags.ids());
    const size_t key_bytes = ids * static_cast<size_t>(kvtable::SizeOf(bags.key_type()));
    const size_t weight_bytes = bags.weights() == nullptr ? 0 : ids * WeightBytes(bags);
    const size_t splits = static_cast<size_t>(bags.size()) + 1;
    // By way of memory that is not pinned, so that nobody has to wait for the copy.
    std::vector<char> packed(splits * sizeof(int64_t) + (key_bytes + 7) / 8 * 8 + weight_bytes);
    int64_t* const begins = reinterpret_cast<int64_t*>(packed.data());
    for (int64_t b = 0; b < bags.size(); ++b) begins[b] = bags.begin(b);
    begins[splits - 1] = bags.ids();
    char* const keys = packed.data() + splits * sizeof(int64_t);
    if (key_bytes > 0) std::memcpy(keys, bags.keys(), key_bytes);
    char* const weights = keys + (key_bytes + 7) / 8 * 8;
    if (weight_bytes > 0) std::memcpy(weights, bags.weights(), weight_bytes);
    memory_ = work->NewArray(packed.size(), stream);
    work->QueueCopy(memory_.get(), packed.data(), packed.size(), stream);
    const char* const there = static_cast<const char*>(memory_.get());
    keys_ = {there + (keys - packed.data()), bags.ids()};
    bags_.splits = reinterpret_cast<const int64_t*>(there);
    bags_.bags = bags.size();
    bags_.combiner = combiner;
    if (bags.weights() != nullptr) bags_.weights = there + (weights - packed.data());
  }

  const kvtable::DeviceKeys& keys() const { return keys_; }
  const kvtable::DeviceBags& bags() const { return bags_; }

  static size_t WeightBytes(const kvtable::Bags& bags) {
    return bags.value_type() == kvtable::ValueType::kFloat64 ? sizeof(double) : sizeof(float);
  }

 private:
  std::shared_ptr<void> memory_;
  kvtable::DeviceKeys keys_;
  kvtable::DeviceBags bags_;
};

class PoolOp : public PoolOpBase {
 public:
  using PoolOpBase::PoolOpBase;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    TF_RETURN_IF_ERROR(ctx->GetAttr("mode", &mode_));
    return PoolOpBase::SetUp(ctx);
  }

  absl::Status Work(OpKernelContext* ctx) override {
    TableList tables;
    TF_RETURN_IF_ERROR(tables.Find(ctx, attrs_, key_dtype_, dtype_));
    KernelThreads threads(ctx);
    std::vector<std::unique_ptr<kvtable::Bags>> bags;
    TF_RETURN_IF_ERROR(MakeBags(ctx, &threads, &bags));
    std::vector<kvtable::PooledLookup> lookups;
    for (size_t t = 0; t < bags.size(); ++t) {
      const int i = static_cast<int>(t);
      Tensor* rows = nullptr;
      TF_RETURN_IF_ERROR(AllocatePooled(ctx, *bags[t], t, &rows));
      lookups.push_back({tables.parts(i), bags[t].get(), combiners_[t], rows->data(),
                         MissingKeysOf(mode_, tables.resource(i))});
      TF_RETURN_IF_ERROR(CheckFits(ctx, tables.config(i), lookups.back().missing, bags[t]->keys(),
                                   bags[t]->ids(), static_cast<int64_t>(lookups.back().parts.size()),
                                   &threads));
    }
    std::shared_ptr<Gpu> gpu;
    if (on_gpu()) TF_RETURN_IF_ERROR(Gpu::Of(ctx, &gpu));
    return tables.Catch("looking up", [&] {
      if (gpu == nullptr) kvtable::PoolRows(lookups, threads);
      for (size_t t = 0; gpu != nullptr && t < lookups.size(); ++t) {
        PoolOnGpu(gpu->work(), lookups[t], tables, static_cast<int>(t), &threads);
      }
      return absl::OkStatus();
    });
  }

 private:
  static void PoolOnGpu(kvtable::DeviceWork* work, const kvtable::PooledLookup& lookup,
                        const TableList& tables, int table_number, kvtable::ParallelFor* threads) {
    if (lookup.parts.size() > 1) {
      kvtable::PooledLookup on_host = lookup;
      on_host.parts = tables.host_parts(table_number);
      std::vector<char> rows(static_cast<size_t>(lookup.bags->size()) * RowBytes(lookup.parts));
      on_host.rows = rows.data();
      kvtable::PoolRows({on_host}, *threads);
      return work->Copy(lookup.rows, rows.data(), rows.size(), threads->stream());
    }
    const BagsOnGpu bags(work, threads->stream(), *lookup.bags, lookup.combiner);
    kvtable::DeviceTable* const table = kvtable::DeviceTableOf(lookup.parts[0]);
    const kvtable::MissingKeys& missing = lookup.missing;
    if (missing.insert && (missing.admission != 1.0 || lookup.parts[0]->admitter() != nullptr)) {
      const std::shared_ptr<void> rows =
          work->NewArray(static_cast<size_t>(bags.keys().n) * RowBytes(lookup.parts), threads->stream());
      kvtable::LookUpOne(lookup.parts[0], bags.keys().keys, bags.keys().n, kvtable::RowsOut(rows.get()),
                         missing, *threads);
      table->GatherPooled(bags.keys(), bags.bags(), missing.below, lookup.rows, threads->stream());
    } else if (missing.insert) {
      table->GatherPooledOrInsert(bags.keys(), bags.bags(), lookup.missing.stamp, lookup.rows,
                                  threads->stream());
    } else {
      table->GatherPooled(bags.keys(), bags.bags(), lookup.missing.missing, lookup.rows, threads->stream());
    }
  }

  std::string mode_;
};

class PoolGradientOp : public PoolOpBase {
 public:
  using PoolOpBase::PoolOpBase;

 protected:
  absl::Status Work(OpKernelContext* ctx) override {
    KernelThreads threads(ctx);
    std::vector<std::unique_ptr<kvtable::Bags>> bags;
    TF_RETURN_IF_ERROR(MakeBags(ctx, &threads, &bags));
    tf::OpInputList gradients;
    TF_RETURN_IF_ERROR(ctx->input_list("gradients", &gradients));
    std::shared_ptr<Gpu> gpu;
    if (on_gpu()) TF_RETURN_IF_ERROR(Gpu::Of(ctx, &gpu));
    std::vector<kvtable::PooledGradient> sums;
    for (size_t t = 0; t < bags.size(); ++t) {
      const Tensor& gradient = gradients[static_cast<int>(t)];
      TF_RETURN_IF_ERROR(CheckPooled("gradients", gradient, *bags[t], t));
      sums.push_back({bags[t].get(), combiners_[t], attrs_.parts[t], dims_[t], gradient.data()});
    }
    const kvtable::SumByKey by_key(std::move(sums), threads);
    if (gpu == nullptr) return Write(ctx, by_key, &threads);
    for (size_t t = 0, h = 0; t < bags.size(); ++t) {
      for (int64_t p = 0; p < attrs_.parts[t]; ++p, ++h) {
        TF_RETURN_IF_ERROR(SumOnGpu(ctx, gpu->work(), by_key.TermsOf(t, p), static_cast<int>(h),
                                    gradients[static_cast<int>(t)], dims_[t]));
      }
    }
    return absl::OkStatus();
  }

 private:
  absl::Status SumOnGpu(OpKernelContext* ctx, kvtable::DeviceWork* work,
                        const kvtable::SumByKey::Terms& terms, int h, const Tensor& gradient,
                        int64_t dim) const {
    const int64_t count = static_cast<int64_t>(terms.begins.size()) - 1;
    Tensor *keys = nullptr, *rows = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(h, TensorShape({count}), &keys));
    TF_RETURN_IF_ERROR(ctx->allocate_output(ctx->num_outputs() / 2 + h, TensorShape({count, dim}), &rows));
    const kvtable::DeviceStream stream = StreamOf(ctx);
    const auto upload = [&](const void* from, size_t bytes) {
      std::shared_ptr<void> there = work->NewArray(bytes, stream);
      work->QueueCopy(there.get(), from, bytes, stream);
      return there;
    };
    const auto begins = upload(terms.begins.data(), terms.begins.size() * sizeof(uint32_t));
    const auto bags = upload(terms.bags.data(), terms.bags.size() * sizeof(uint32_t));
    const auto scales = upload(terms.scales.data(), terms.scales.size());
    work->QueueCopy(keys->data(), terms.keys.data(), terms.keys.size(), stream);
    work->SumRows(ToValueType(dtype_), dim,
                  {count, static_cast<const uint32_t*>(begins.get()),
                   static_cast<const uint32_t*>(bags.get()), scales.get()},
                  gradient.data(), rows->data(), stream);
    return absl::OkStatus();
  }

  absl::Status Write(OpKernelContext* ctx, const kvtable::SumByKey& by_key,
                     kvtable::ParallelFor* threads) const {
    const int handles = ctx->num_outputs() / 2;
    int h = 0;
    std::vector<std::vector<kvtable::SumByKey::Share>> shares(attrs_.parts.size());
    for (size_t t = 0; t < attrs_.parts.size(); ++t) {
      for (int64_t p = 0; p < attrs_.parts[t]; ++p, ++h) {
        const int64_t count = by_key.count(t, p);
        Tensor *keys = nullptr, *rows = nullptr;
        TF_RETURN_IF_ERROR(ctx->allocate_output(h, TensorShape({count}), &keys));
        TF_RETURN_IF_ERROR(ctx->allocate_output(handles + h, TensorShape({count, dims_[t]}), &rows));
        shares[t].push_back({keys->data(), rows->data()});
      }
    }
    by_key.Write(shares, *threads);
    return absl::OkStatus();
  }
};

class PoolWeightsGradientOp : public PoolOpBase {
 public:
  using PoolOpBase::PoolOpBase;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    TF_RETURN_IF_ERROR(ctx->GetAttr("mode", &mode_));
    return PoolOpBase::SetUp(ctx);
  }

  absl::Status Work(OpKernelContext* ctx) override {
    TableList tables;
    TF_RETURN_IF_ERROR(tables.Find(ctx, attrs_, key_dtype_, dtype_));
    KernelThreads threads(ctx);
    std::vector<std::unique_ptr<kvtable::Bags>> bags;
    TF_RETURN_IF_ERROR(MakeBags(ctx, &threads, &bags));
    tf::OpInputList rows, gradients, weights;
    TF_RETURN_IF_ERROR(ctx->input_list("rows", &rows));
    TF_RETURN_IF_ERROR(ctx->input_list("gradients", &gradients));
    TF_RETURN_IF_ERROR(ctx->input_list("weights", &weights));
    std::vector<kvtable::PooledWeightsGradient> lookups;
    int w = 0;
    for (size_t t = 0; t < bags.size(); ++t) {
      if (!weighted_[t]) continue;
      const int i = static_cast<int>(t);
      TF_RETURN_IF_ERROR(CheckPooled("rows", rows[i], *bags[t], t));
      TF_RETURN_IF_ERROR(CheckPooled("gradients", gradients[i], *bags[t], t));
      Tensor* out = nullptr;
      TF_RETURN_IF_ERROR(ctx->allocate_output(w, weights[w].shape(), &out));
      ++w;
      if (out->NumElements() > 0) std::memset(out->data(), 0, out->TotalBytes());
      // A key that training inserted is there; if it has gone meanwhile, its initial value stands for it.
      kvtable::MissingKeys missing = MissingKeysOf(mode_, tables.resource(i));
      if (missing.insert) missing.missing = kvtable::Missing::kInitial;
      if (missing.insert && !tables.config(i).policies.admission.admits_all())
        missing.missing = missing.below;
      lookups.push_back({tables.parts(i), bags[t].get(), combiners_[t], rows[i].data(), gradients[i].data(),
                         out->data(), missing});
    }
    std::shared_ptr<Gpu> gpu;
    if (on_gpu()) TF_RETURN_IF_ERROR(Gpu::Of(ctx, &gpu));
    return tables.Catch("looking up", [&] {
      if (gpu == nullptr) kvtable::PoolWeightsGradient(lookups, threads);
      size_t i = 0;
      for (size_t t = 0; gpu != nullptr && t < bags.size(); ++t) {
        if (weighted_[t]) FindOnGpu(gpu->work(), lookups[i++], tables, static_cast<int>(t), &threads);
      }
      return absl::OkStatus();
    });
  }

 private:
  static void FindOnGpu(kvtable::DeviceWork* work, const kvtable::PooledWeightsGradient& lookup,
                        const TableList& tables, int table_number, kvtable::ParallelFor* threads) {
    const kvtable::DeviceStream stream = threads->stream();
    const kvtable::Bags& bags = *lookup.bags;
    if (lookup.parts.size() > 1) {
      const size_t bytes = static_cast<size_t>(bags.size()) * RowBytes(lookup.parts);
      std::vector<char> rows(bytes), gradient(bytes);
      work->Copy(rows.data(), lookup.rows, bytes, stream);
      work->Copy(gradient.data(), lookup.gradient, bytes, stream);
      kvtable::PooledWeightsGradient on_host = lookup;
      on_host.parts = tables.host_parts(table_number);
      on_host.rows = rows.data();
      on_host.gradient = gradient.data();
      return kvtable::PoolWeightsGradient({on_host}, *threads);
    }
    const BagsOnGpu there(work, stream, bags, lookup.combiner);
    const size_t each = BagsOnGpu::WeightBytes(bags);
    const std::shared_ptr<void> found = work->NewArray(static_cast<size_t>(bags.ids()) * each, stream);
    kvtable::DeviceTableOf(lookup.parts[0])
        ->WeightsGradient(there.keys(), there.bags(), lookup.missing.missing, lookup.rows, lookup.gradient,
                          found.get(), stream);
    std::vector<char> in_bags(static_cast<size_t>(bags.ids()) * each);
    work->Copy(in_bags.data(), found.get(), in_bags.size(), stream);
    for (int64_t i = 0; i < bags.ids(); ++i) {
      if (bags.source(i) == kvtable::Bags::kFiller) continue;
      std::memcpy(static_cast<char*>(lookup.weights) + bags.source(i) * each,
                  in_bags.data() + static_cast<size_t>(i) * each, each);
    }
  }

  std::string mode_;
};

KVTOOLS_REGISTER(Name("KvTablePool")
                     .HostMemory("keys")
                     .HostMemory("segments")
                     .HostMemory("shapes")
                     .HostMemory("weights")
                     .HostMemory("fill_keys"),
                 PoolOp);
KVTOOLS_REGISTER(Name("KvTablePoolGradient")
                     .HostMemory("keys")
                     .HostMemory("segments")
                     .HostMemory("shapes")
                     .HostMemory("weights")
                     .HostMemory("fill_keys"),
                 PoolGradientOp);
KVTOOLS_REGISTER(Name("KvTablePoolWeightsGradient")
                     .HostMemory("keys")
                     .HostMemory("segments")
                     .HostMemory("shapes")
                     .HostMemory("weights")
                     .HostMemory("fill_keys")
                     .HostMemory("weight_gradients"),
                 PoolWeightsGradientOp);

}  // namespace
}  // namespace kvtools
