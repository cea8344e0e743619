// Kernels of rows that go, and of the step and the epoch that they go by.

#include <algorithm>
#include <string>
#include <vector>

#include "errors.h"
#include "expiry.h"
#include "table_kernel.h"
#include "table_policies.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelConstruction;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

kvtable::RankBy RankByNamed(const std::string& name) {
  if (name == "norm") return kvtable::RankBy::kNorm;
  return name == "version" ? kvtable::RankBy::kVersion : kvtable::RankBy::kFrequency;
}

constexpr int64_t kSearchNumbers = 4;

absl::Status ReadSearch(const Tensor& tensor, kvtable::RankBy by, kvtable::RankSearch* search) {
  if (tensor.NumElements() != kSearchNumbers) {
    return errors::InvalidArgument("A search of ranks has ", kSearchNumbers, " numbers, got ",
                                   tensor.shape().DebugString());
  }
  const auto numbers = tensor.flat<int64_t>();
  if (numbers(0) < 0 || numbers(0) > kvtable::RankDigit::kDigits || numbers(3) < 0) {
    return errors::InvalidArgument("A search of ranks has found ", numbers(0), " digits and keeps ",
                                   numbers(3), " rows.");
  }
  *search =
      kvtable::RankSearch(by, static_cast<int>(numbers(0)),
                          {static_cast<uint64_t>(numbers(1)), static_cast<uint64_t>(numbers(2))}, numbers(3));
  return absl::OkStatus();
}

absl::Status ReadRankBy(OpKernelConstruction* ctx, kvtable::RankBy* by) {
  std::string name;
  TF_RETURN_IF_ERROR(ctx->GetAttr("by", &name));
  *by = RankByNamed(name);
  return absl::OkStatus();
}

absl::Status ReadNumber(const Tensor& tensor, const char* what, int64_t least, uint32_t* number,
                        bool* given) {
  if (tensor.NumElements() != 1) {
    return errors::InvalidArgument(what, " is one number, got ", tensor.shape().DebugString());
  }
  const int64_t value = tensor.flat<int64_t>()(0);
  if (value < least || value > int64_t{UINT32_MAX}) {
    return errors::InvalidArgument(what, " must be 0 to 4294967295, got ", value);
  }
  *given = value >= 0;
  if (*given) *number = static_cast<uint32_t>(value);
  return absl::OkStatus();
}

class EvictOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    std::string json;
    TF_RETURN_IF_ERROR(ctx->GetAttr("policy", &json));
    return CatchErrors("reading the policy of", name(), [&] {
      policy_ = EvictPolicyFromJson(Json::Parse(json));
      kvtable::CheckPolicies({policy_});
      return absl::OkStatus();
    });
  }

  const char* doing() const override { return "evicting rows of"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({}), &out));
    int64_t& evicted = out->scalar<int64_t>()();
    if (ctx->input(1).NumElements() == 0) {
      evicted = kvtable::Evict(open->table.get(), policy_, open->threads);
      return absl::OkStatus();
    }
    kvtable::RankSearch search(policy_.by, 1);
    TF_RETURN_IF_ERROR(ReadSearch(ctx->input(1), policy_.by, &search));
    evicted = kvtable::EvictBelow(open->table.get(), policy_.by, search.least_rank(), open->threads);
    return absl::OkStatus();
  }

 private:
  kvtable::EvictPolicy policy_;
};

class CountRanksOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override { return ReadRankBy(ctx, &by_); }

  const char* doing() const override { return "ranking rows of"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    kvtable::RankSearch search(by_, 1);
    TF_RETURN_IF_ERROR(ReadSearch(ctx->input(1), by_, &search));
    const bool goes_on = search.next() != nullptr;
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(
        ctx->allocate_output(0, TensorShape({goes_on ? kvtable::RankDigit::kValues : 0}), &out));
    if (!goes_on) return absl::OkStatus();
    if (search.digits() == 0) kvtable::EvictExpired(open->table.get(), open->threads);
    int64_t* const counts = out->flat<int64_t>().data();
    std::fill_n(counts, kvtable::RankDigit::kValues, 0);
    kvtable::PassCursor cursor;
    open->table->CountRanks(*search.next(), &cursor, kvtable::kAllRows, counts, open->threads);
    return absl::OkStatus();
  }

 private:
  kvtable::RankBy by_ = kvtable::RankBy::kFrequency;
};

class SearchRanksOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override { return ReadRankBy(ctx, &by_); }

  absl::Status Work(OpKernelContext* ctx) override {
    kvtable::RankSearch search(by_, 1);
    TF_RETURN_IF_ERROR(ReadSearch(ctx->input(0), by_, &search));
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({kSearchNumbers}), &out));
    if (search.next() != nullptr) {
      if (ctx->input(1).NumElements() != kvtable::RankDigit::kValues) {
        return errors::InvalidArgument("A search of ranks wants ", kvtable::RankDigit::kValues,
                                       " counts, got ", ctx->input(1).shape().DebugString());
      }
      const int64_t* const counts = ctx->input(1).flat<int64_t>().data();
      search.Take({counts, counts + kvtable::RankDigit::kValues});
    }
    auto numbers = out->vec<int64_t>();
    numbers(0) = search.digits();
    numbers(1) = static_cast<int64_t>(search.least_rank().measure);
    numbers(2) = static_cast<int64_t>(search.least_rank().key);
    numbers(3) = search.left();
    return absl::OkStatus();
  }

 private:
  kvtable::RankBy by_ = kvtable::RankBy::kFrequency;
};

class StepOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "setting the step of"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    uint32_t step = 0;
    bool given = false;
    TF_RETURN_IF_ERROR(ReadNumber(ctx->input(1), "A step", -1, &step, &given));
    if (given) {
      open->table->SetStep(step);
    } else if (!CountsSteps(*open->table)) {
      return errors::FailedPrecondition("Key-value variable '", open->config().name,
                                        "' counts no steps: build it with expiry=ExpireAfterSteps(n).");
    }
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({}), &out));
    out->scalar<int64_t>()() = open->table->Now();
    return absl::OkStatus();
  }
};

class SetEpochOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "setting the epoch of"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    uint32_t epoch = 0;
    bool given = false;
    TF_RETURN_IF_ERROR(ReadNumber(ctx->input(1), "An epoch", 0, &epoch, &given));
    open->table->SetEpoch(epoch);
    return absl::OkStatus();
  }
};

KVTOOLS_REGISTER(Name("KvTableEvict").HostMemory("search").HostMemory("evicted"), EvictOp);
KVTOOLS_REGISTER(Name("KvTableCountRanks").HostMemory("search").HostMemory("counts"), CountRanksOp);
KVTOOLS_REGISTER(Name("KvTableSearchRanks").HostMemory("search").HostMemory("counts").HostMemory("found"),
                 SearchRanksOp);
KVTOOLS_REGISTER(Name("KvTableStep").HostMemory("step").HostMemory("now"), StepOp);
KVTOOLS_REGISTER(Name("KvTableSetEpoch").HostMemory("epoch"), SetEpochOp);

}  // namespace
}  // namespace kvtools
