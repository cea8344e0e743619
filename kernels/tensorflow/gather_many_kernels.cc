// Kernels of lookups of several tables, or of the parts of one, in one op; of their gradient; and of who owns
// a key.

#include <string>
#include <vector>

#include "errors.h"
#include "huge_output.h"
#include "kernel.h"
#include "kernel_threads.h"
#include "kvtable/lookup_parts.h"
#include "kvtable/part_of.h"
#include "kvtable/split_by_part.h"
#include "reply_error.h"
#include "table_list.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelConstruction;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

class GatherManyOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    TF_RETURN_IF_ERROR(attrs_.Read(ctx));
    return ReadAttrs(ctx, "mode", &mode_, "remember", &remember_, "Tkeys", &key_dtype_, "dtype", &dtype_);
  }

  int tables() const { return attrs_.tables(); }
  int64_t dim(int table) const { return attrs_.dims[static_cast<size_t>(table)]; }

  absl::Status Work(OpKernelContext* ctx) override {
    TableList tables;
    TF_RETURN_IF_ERROR(tables.Find(ctx, attrs_, key_dtype_, dtype_, true));
    tf::OpInputList keys;
    TF_RETURN_IF_ERROR(ctx->input_list("keys", &keys));
    std::vector<kvtable::PartsLookup> lookups;
    KernelThreads threads(ctx);
    for (int t = 0; t < attrs_.tables(); ++t) {
      TensorShape shape = keys[t].shape();
      TF_RETURN_IF_ERROR(shape.AddDimWithStatus(attrs_.dims[static_cast<size_t>(t)]));
      Tensor* rows = nullptr;
      Tensor* positions = nullptr;
      TF_RETURN_IF_ERROR(ctx->allocate_output(t, shape, &rows));
      WantHugePages(ctx, *rows);
      TF_RETURN_IF_ERROR(ctx->allocate_output(attrs_.tables() + t,
                                              remember_ ? keys[t].shape() : TensorShape({0}), &positions));
      const kvtable::RowsOut out(rows->data(),
                                 remember_ ? static_cast<uint64_t*>(positions->data()) : nullptr, nullptr,
                                 IsWidened(tables.config(t), dtype_));
      lookups.push_back({tables.parts(t), keys[t].data(), keys[t].NumElements(), out,
                         MissingKeysOf(mode_, tables.resource(t))});
      const kvtable::PartsLookup& lookup = lookups.back();
      TF_RETURN_IF_ERROR(CheckFits(ctx, tables.config(t), lookup.missing, lookup.keys, lookup.n,
                                   static_cast<int64_t>(lookup.parts.size()), &threads));
    }
    return tables.Catch("looking up", [&] { return LookUp(ctx, tables, lookups, &threads); });
  }

  virtual absl::Status LookUp(OpKernelContext*, const TableList&,
                              const std::vector<kvtable::PartsLookup>& lookups,
                              kvtable::ParallelFor* threads) {
    kvtable::LookUpParts(lookups, *threads);
    return absl::OkStatus();
  }

 private:
  TableListAttrs attrs_;
  std::string mode_;
  bool remember_ = false;
  tf::DataType key_dtype_;
  tf::DataType dtype_;
};

// On a GPU, one table after the other: each lookup has all of the GPU. Parts of one variable on one GPU have
// no use there, so those who have them all the same pay for the copies: their keys are sorted on the host.
class GatherManyOnGpuOp : public GatherManyOp {
 public:
  using GatherManyOp::GatherManyOp;

 protected:
  absl::Status LookUp(OpKernelContext* ctx, const TableList& tables,
                      const std::vector<kvtable::PartsLookup>& lookups,
                      kvtable::ParallelFor* threads) override {
    for (size_t t = 0; t < lookups.size(); ++t) {
      const kvtable::PartsLookup& lookup = lookups[t];
      if (lookup.parts.size() == 1) {
        kvtable::LookUpOne(lookup.parts[0], lookup.keys, lookup.n, lookup.out, lookup.missing, *threads);
      } else {
        TF_RETURN_IF_ERROR(LookUpOnHost(ctx, tables.host_parts(static_cast<int>(t)), lookup, threads));
      }
    }
    return absl::OkStatus();
  }

 private:
  static absl::Status LookUpOnHost(OpKernelContext* ctx, const kvtable::TableParts& parts,
                                   const kvtable::PartsLookup& lookup, kvtable::ParallelFor* threads) {
    std::shared_ptr<Gpu> gpu;
    TF_RETURN_IF_ERROR(Gpu::Of(ctx, &gpu));
    const size_t n = static_cast<size_t>(lookup.n);
    const size_t key_bytes = static_cast<size_t>(kvtable::SizeOf(parts[0]->key_type()));
    const size_t row_bytes = static_cast<size_t>(parts[0]->dim() * kvtable::SizeOf(parts[0]->value_type()));
    std::vector<char> keys(n * key_bytes);
    gpu->work()->Copy(keys.data(), lookup.keys, keys.size(), threads->stream());
    const kvtable::SplitByPart split(parts[0]->key_type(), keys.data(), lookup.n,
                                     static_cast<int64_t>(parts.size()), *threads);
    std::vector<std::vector<char>> part_keys;
    std::vector<std::vector<uint32_t>> places;
    std::vector<kvtable::SplitByPart::Share> shares;
    for (size_t p = 0; p < parts.size(); ++p) {
      const size_t count = static_cast<size_t>(split.count(static_cast<int64_t>(p)));
      part_keys.emplace_back(count * key_bytes);
      places.emplace_back(count);
      shares.push_back({part_keys.back().data(), nullptr, nullptr, places.back().data()});
    }
    split.Write(nullptr, 0, nullptr, shares, *threads);
    std::vector<char> rows(n * row_bytes);
    std::vector<uint64_t> positions(lookup.out.positions == nullptr ? 0 : n);
    for (size_t p = 0; p < parts.size(); ++p) {
      const int64_t count = split.count(static_cast<int64_t>(p));
      if (count == 0) continue;
      kvtable::LookUpOne(
          parts[p], part_keys[p].data(), count,
          kvtable::RowsOut(rows.data(), positions.empty() ? nullptr : positions.data(), places[p].data(),
                           lookup.out.widened),  // which is refused
          lookup.missing, *threads);
    }
    gpu->work()->Copy(lookup.out.rows, rows.data(), rows.size(), threads->stream());
    gpu->work()->Copy(lookup.out.positions, positions.data(), positions.size() * sizeof(uint64_t),
                      threads->stream());
    return absl::OkStatus();
  }
};

class SplitGradientsOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override { return attrs_.Read(ctx); }

  absl::Status Work(OpKernelContext* ctx) override {
    tf::OpInputList keys, gradients, positions;
    TF_RETURN_IF_ERROR(ctx->input_list("keys", &keys));
    TF_RETURN_IF_ERROR(ctx->input_list("gradients", &gradients));
    TF_RETURN_IF_ERROR(ctx->input_list("positions", &positions));
    KernelThreads threads(ctx);
    int h = 0;
    for (int t = 0; t < attrs_.tables(); ++t) {
      const int64_t dim = attrs_.dims[static_cast<size_t>(t)];
      const int64_t n = keys[t].NumElements();
      TensorShape rows({n});
      TF_RETURN_IF_ERROR(rows.AddDimWithStatus(dim));
      if (gradients[t].NumElements() != rows.num_elements()) {
        return errors::InvalidArgument("gradients of ", n, " keys are of shape ",
                                       gradients[t].shape().DebugString(), ", expected rows of ", dim);
      }
      const bool remembered = positions[t].NumElements() == n;
      const int64_t parts = attrs_.parts[static_cast<size_t>(t)];
      TF_RETURN_IF_ERROR(on_gpu() && parts > 1
                             ? SplitOnHost(ctx, keys[t], gradients[t], dim, parts, h, &threads)
                             : Split(ctx, keys[t], gradients[t], remembered ? &positions[t] : nullptr, dim,
                                     parts, h, &threads));
      h += static_cast<int>(parts);
    }
    return absl::OkStatus();
  }

 private:
  static absl::Status Split(OpKernelContext* ctx, const Tensor& keys, const Tensor& rows,
                            const Tensor* positions, int64_t dim, int64_t parts, int first,
                            kvtable::ParallelFor* threads) {
    const int64_t n = keys.NumElements();
    const int all = ctx->num_outputs() / 3;
    if (parts == 1) {  // nothing to take apart, and so nothing to copy
      const Tensor none(tf::DT_INT64, TensorShape({0}));
      TF_RETURN_IF_ERROR(SetReshaped(ctx, first, keys, TensorShape({n})));
      TF_RETURN_IF_ERROR(SetReshaped(ctx, all + first, rows, TensorShape({n, dim})));
      return SetReshaped(ctx, 2 * all + first, positions == nullptr ? none : *positions,
                         TensorShape({positions == nullptr ? 0 : n}));
    }
    const kvtable::SplitByPart split(ToKeyType(keys.dtype()), keys.data(), n, parts, *threads);
    std::vector<kvtable::SplitByPart::Share> shares;
    for (int p = 0; p < static_cast<int>(parts); ++p) {
      const int64_t count = split.count(p);
      Tensor *part_keys = nullptr, *part_rows = nullptr, *part_positions = nullptr;
      TF_RETURN_IF_ERROR(ctx->allocate_output(first + p, TensorShape({count}), &part_keys));
      TF_RETURN_IF_ERROR(ctx->allocate_output(all + first + p, TensorShape({count, dim}), &part_rows));
      WantHugePages(ctx, *part_rows);
      TF_RETURN_IF_ERROR(ctx->allocate_output(
          2 * all + first + p, TensorShape({positions == nullptr ? 0 : count}), &part_positions));
      shares.push_back(
          {part_keys->data(), part_rows->data(), static_cast<uint64_t*>(part_positions->data())});
    }
    split.Write(rows.data(), dim * tf::DataTypeSize(rows.dtype()),
                positions == nullptr ? nullptr : static_cast<const uint64_t*>(positions->data()), shares,
                *threads);
    return absl::OkStatus();
  }

  // Of a GPU's arrays; see GatherManyOnGpuOp.
  static absl::Status SplitOnHost(OpKernelContext* ctx, const Tensor& keys, const Tensor& rows, int64_t dim,
                                  int64_t parts, int first, kvtable::ParallelFor* threads) {
    std::shared_ptr<Gpu> gpu;
    TF_RETURN_IF_ERROR(Gpu::Of(ctx, &gpu));
    const int64_t n = keys.NumElements();
    const int all = ctx->num_outputs() / 3;
    Tensor host_keys, host_rows;
    TF_RETURN_IF_ERROR(ctx->allocate_temp(keys.dtype(), TensorShape({n}), &host_keys, OnHost()));
    TF_RETURN_IF_ERROR(ctx->allocate_temp(rows.dtype(), TensorShape({n, dim}), &host_rows, OnHost()));
    gpu->work()->QueueCopy(host_keys.data(), keys.data(), keys.TotalBytes(), threads->stream());
    gpu->work()->Copy(host_rows.data(), rows.data(), rows.TotalBytes(), threads->stream());
    const kvtable::SplitByPart split(ToKeyType(keys.dtype()), host_keys.data(), n, parts, *threads);
    std::vector<Tensor> kept(static_cast<size_t>(2 * parts));  // until they are copied
    std::vector<kvtable::SplitByPart::Share> shares;
    for (int64_t p = 0; p < parts; ++p) {
      const int64_t count = split.count(p);
      Tensor& part_keys = kept[static_cast<size_t>(2 * p)];
      Tensor& part_rows = kept[static_cast<size_t>(2 * p + 1)];
      TF_RETURN_IF_ERROR(ctx->allocate_temp(keys.dtype(), TensorShape({count}), &part_keys, OnHost()));
      TF_RETURN_IF_ERROR(ctx->allocate_temp(rows.dtype(), TensorShape({count, dim}), &part_rows, OnHost()));
      shares.push_back({part_keys.data(), part_rows.data(), nullptr});
    }
    split.Write(host_rows.data(), dim * tf::DataTypeSize(rows.dtype()), nullptr, shares, *threads);
    for (int p = 0; p < static_cast<int>(parts); ++p) {
      for (int column = 0; column < 2; ++column) {
        const Tensor& from = kept[static_cast<size_t>(2 * p + column)];
        Tensor* to = nullptr;
        TF_RETURN_IF_ERROR(ctx->allocate_output(column * all + first + p, from.shape(), &to));
        gpu->work()->QueueCopy(to->data(), from.data(), from.TotalBytes(), threads->stream());
      }
      Tensor* none = nullptr;
      TF_RETURN_IF_ERROR(ctx->allocate_output(2 * all + first + p, TensorShape({0}), &none));
    }
    gpu->work()->Wait(threads->stream());
    return absl::OkStatus();
  }

  static absl::Status SetReshaped(OpKernelContext* ctx, int output, const Tensor& tensor,
                                  const TensorShape& shape) {
    Tensor reshaped;
    if (!reshaped.CopyFrom(tensor, shape)) {
      return errors::Internal("cannot take ", tensor.shape().DebugString(), " for ", shape.DebugString());
    }
    ctx->set_output(output, reshaped);
    return absl::OkStatus();
  }

  TableListAttrs attrs_;
};

// Of a batch whose gradients stay where they are: the keys of each part, their positions and their places.
class SplitKeysOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override { return ctx->GetAttr("parts", &parts_); }

  absl::Status Work(OpKernelContext* ctx) override {
    const Tensor& keys = ctx->input(0);
    const Tensor& positions = ctx->input(1);
    const int64_t n = keys.NumElements();
    const bool remembered = positions.NumElements() == n;
    KernelThreads threads(ctx);
    const kvtable::SplitByPart split(ToKeyType(keys.dtype()), keys.data(), n, parts_, threads);
    const int parts = static_cast<int>(parts_);
    std::vector<kvtable::SplitByPart::Share> shares;
    for (int p = 0; p < parts; ++p) {
      const int64_t count = split.count(p);
      Tensor *part_keys = nullptr, *part_positions = nullptr, *places = nullptr;
      TF_RETURN_IF_ERROR(ctx->allocate_output(p, TensorShape({count}), &part_keys));
      TF_RETURN_IF_ERROR(
          ctx->allocate_output(parts + p, TensorShape({remembered ? count : 0}), &part_positions));
      TF_RETURN_IF_ERROR(ctx->allocate_output(2 * parts + p, TensorShape({count}), &places));
      shares.push_back({part_keys->data(), nullptr, static_cast<uint64_t*>(part_positions->data()),
                        static_cast<uint32_t*>(places->data())});
    }
    split.Write(nullptr, 0, remembered ? static_cast<const uint64_t*>(positions.data()) : nullptr, shares,
                threads);
    return absl::OkStatus();
  }

 private:
  int64_t parts_ = 1;
};

// The part that owns each key.
template <typename K>
class PartitionOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override { return ctx->GetAttr("parts", &parts_); }

  absl::Status Work(OpKernelContext* ctx) override {
    const Tensor& keys = ctx->input(0);
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, keys.shape(), &out));
    const auto in = keys.flat<K>();
    auto owner = out->flat<int32_t>();
    const kvtable::PartOf<K> part_of(parts_);
    for (int64_t i = 0; i < in.size(); ++i) owner(i) = static_cast<int32_t>(part_of(in(i)));
    return absl::OkStatus();
  }

 private:
  int64_t parts_ = 1;
};

// Either of these for an exchange between ranks: where it fails the op does not. Its rows are of no use then.
template <class Gather>
class GatherOrErrorOp : public Gather {
 public:
  using Gather::Gather;

 protected:
  absl::Status Work(OpKernelContext* ctx) override {
    const int last = 2 * this->tables();
    Tensor* error = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(last, TensorShape({}), &error));
    const absl::Status found = CatchErrors("looking up", "", [&] { return Gather::Work(ctx); });
    if (found.ok()) return found;
    error->scalar<tf::tstring>()() = CodeAndMessage(found);
    for (int i = 0; i < last; ++i) {
      if (ctx->mutable_output(i) != nullptr) continue;
      // Of rows as many as there would be: what puts them together takes no others.
      TensorShape shape({0});
      if (i < this->tables()) {
        shape = ctx->input(ctx->num_inputs() - this->tables() + i).shape();
        TF_RETURN_IF_ERROR(shape.AddDimWithStatus(this->dim(i)));
      }
      Tensor* none = nullptr;
      TF_RETURN_IF_ERROR(ctx->allocate_output(i, shape, &none));
    }
    return absl::OkStatus();
  }
};

KVTOOLS_REGISTER_ON(tf::DEVICE_CPU, Name("KvExchangeLookUp").Priority(1).HostMemory("error"),
                    GatherOrErrorOp<GatherManyOp>);
KVTOOLS_REGISTER_ON(tf::DEVICE_GPU, Name("KvExchangeLookUp").HostMemory("error"),
                    GatherOrErrorOp<GatherManyOnGpuOp>);
KVTOOLS_REGISTER_ON(tf::DEVICE_CPU, Name("KvTableGatherMany").Priority(1), GatherManyOp);
KVTOOLS_REGISTER_ON(tf::DEVICE_GPU, Name("KvTableGatherMany"), GatherManyOnGpuOp);
KVTOOLS_REGISTER(Name("KvTableSplitGradients"), SplitGradientsOp);
KVTOOLS_REGISTER(Name("KvTableSplitKeys")
                     .HostMemory("keys")
                     .HostMemory("positions")
                     .HostMemory("part_keys")
                     .HostMemory("part_positions")
                     .HostMemory("places"),
                 SplitKeysOp);
#define KVTOOLS_PARTITION(K)                                                                      \
  KVTOOLS_REGISTER(                                                                               \
      Name("KvTablePartition").TypeConstraint<K>("Tkeys").HostMemory("keys").HostMemory("owner"), \
      PartitionOp<K>)
KVTOOLS_PARTITION(int64_t);
KVTOOLS_PARTITION(int32_t);
KVTOOLS_PARTITION(uint64_t);
#undef KVTOOLS_PARTITION

}  // namespace
}  // namespace kvtools
