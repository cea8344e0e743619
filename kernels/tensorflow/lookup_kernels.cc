// Kernels that look up keys in one table.

#include <memory>
#include <new>
#include <string>
#include <vector>

#include "errors.h"
#include "huge_output.h"
#include "table_kernel.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelConstruction;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

// What a batch evicts, as outputs of the op.
class EvictedOutputs : public kvtable::EvictedRows {
 public:
  EvictedOutputs(OpKernelContext* ctx, int64_t dim) : ctx_(ctx), dim_(dim) {}

  void Allocate(int64_t n, void** keys, void** rows) override {
    *keys = Output(2, TensorShape({n}));
    *rows = Output(3, TensorShape({n, dim_}));
    allocated_ = true;
  }
  void AllocateUnlessDone() {
    void* none = nullptr;
    if (!allocated_) Allocate(0, &none, &none);
  }

 private:
  void* Output(int i, const TensorShape& shape) {
    Tensor* out = nullptr;
    if (!ctx_->allocate_output(i, shape, &out).ok()) throw std::bad_alloc();
    return out->data();
  }

  OpKernelContext* const ctx_;
  const int64_t dim_;
  bool allocated_ = false;
};

template <bool kEvicting>
class GatherOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    if (!kEvicting) TF_RETURN_IF_ERROR(ctx->GetAttr("mode", &mode_));
    return ReadAttrs(ctx, "admission", &admission_, "dim", &dim_, "remember", &remember_);
  }

  const char* doing() const override { return "looking up"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    const TableConfig& config = open->config();
    const Tensor& keys = ctx->input(1);
    TF_RETURN_IF_ERROR(CheckKeys(config, keys));
    const bool widened = !kEvicting && IsWidened(config, output_type(0));
    if (dim_ != config.dim || (output_type(0) != config.value_dtype && !widened)) {
      return errors::InvalidArgument("Key-value variable '", config.name, "' has rows of ",
                                     tf::DataTypeString(config.value_dtype), "[", config.dim, "], wanted ",
                                     tf::DataTypeString(output_type(0)), "[", dim_, "]");
    }
    TensorShape shape = keys.shape();
    TF_RETURN_IF_ERROR(shape.AddDimWithStatus(config.dim));
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, shape, &out));
    WantHugePages(ctx, *out);
    Tensor* positions = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(1, remember_ ? keys.shape() : TensorShape({0}), &positions));
    const kvtable::RowsOut rows(out->data(), remember_ ? static_cast<uint64_t*>(positions->data()) : nullptr,
                                nullptr, widened);
    const int64_t n = keys.NumElements();
    const kvtable::MissingKeys missing = MissingKeysOf(mode_, open->resource.get());
    if (!kEvicting) {
      TF_RETURN_IF_ERROR(CheckFits(ctx, config, missing, keys.data(), n, 1, &open->threads));
    }
    EvictedOutputs evicted(ctx, config.dim);
    if (missing.insert) {
      kvtable::Insertion insertion;
      insertion.stamp = missing.stamp;
      insertion.admission = missing.admission;
      insertion.admission_seed = missing.admission_seed;
      insertion.admitter = open->table->admitter().get();
      insertion.below = missing.below;
      if (admission_ != 1.0f) {
        insertion.admission = admission_;
        insertion.admission_seed = open->resource->NextSeed();
      }
      if (kEvicting) insertion.evicted = &evicted;
      open->table->GatherOrInsert(keys.data(), n, rows, insertion, open->threads);
    } else {
      open->table->Gather(keys.data(), n, rows, missing.missing, nullptr, 0, nullptr, open->threads);
    }
    if (kEvicting) evicted.AllocateUnlessDone();
    return absl::OkStatus();
  }

 private:
  std::string mode_ = "train";
  float admission_ = 1.0f;
  int64_t dim_ = 0;
  bool remember_ = false;
};

class TrainableOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status Work(OpKernelContext* ctx) override {
    ctx->set_output(0, ctx->input(3));
    return absl::OkStatus();
  }
};

// What has an answer for each key, of its shape.
class AnswerOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const final { return "looking up"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) final {
    const Tensor& keys = ctx->input(1);
    TF_RETURN_IF_ERROR(CheckKeys(open->config(), keys));
    void* answers[2] = {nullptr, nullptr};
    for (int i = 0; i < num_outputs(); ++i) {
      Tensor* out = nullptr;
      TF_RETURN_IF_ERROR(ctx->allocate_output(i, keys.shape(), &out));
      answers[i] = out->data();
    }
    Answer(*open->table, keys.data(), keys.NumElements(), answers, open->threads);
    return absl::OkStatus();
  }

  // `answers`: (n) of each output.
  virtual void Answer(const kvtable::Table& table, const void* keys, int64_t n, void* const* answers,
                      kvtable::ParallelFor& threads) = 0;
};

class ContainsOp : public AnswerOp {
 public:
  using AnswerOp::AnswerOp;

 protected:
  void Answer(const kvtable::Table& table, const void* keys, int64_t n, void* const* answers,
              kvtable::ParallelFor& threads) override {
    table.Contains(keys, n, static_cast<bool*>(answers[0]), threads);
  }
};

class ZeroedOp : public AnswerOp {
 public:
  using AnswerOp::AnswerOp;

 protected:
  void Answer(const kvtable::Table& table, const void* keys, int64_t n, void* const* answers,
              kvtable::ParallelFor& threads) override {
    table.Zeroed(keys, n, static_cast<bool*>(answers[0]), threads);
  }
};

class StampsOp : public AnswerOp {
 public:
  using AnswerOp::AnswerOp;

 protected:
  void Answer(const kvtable::Table& table, const void* keys, int64_t n, void* const* answers,
              kvtable::ParallelFor& threads) override {
    table.GatherStamps(keys, n, static_cast<uint32_t*>(answers[0]), static_cast<uint32_t*>(answers[1]),
                       threads);
  }
};

class ScoresOp : public AnswerOp {
 public:
  using AnswerOp::AnswerOp;

 protected:
  void Answer(const kvtable::Table& table, const void* keys, int64_t n, void* const* answers,
              kvtable::ParallelFor& threads) override {
    table.Scores(keys, n, static_cast<uint64_t*>(answers[0]), threads);
  }
};

KVTOOLS_REGISTER(Name("KvTableGather"), GatherOp<false>);
KVTOOLS_REGISTER(Name("KvTableGatherEvict"), GatherOp<true>);
KVTOOLS_REGISTER(Name("KvTableTrainable"), TrainableOp);
KVTOOLS_REGISTER(Name("KvTableContains"), ContainsOp);
KVTOOLS_REGISTER(Name("KvTableZeroed"), ZeroedOp);
KVTOOLS_REGISTER(Name("KvTableStamps"), StampsOp);
KVTOOLS_REGISTER(Name("KvTableScores"), ScoresOp);

}  // namespace
}  // namespace kvtools
