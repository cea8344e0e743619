// Kernels that tell how a table does.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "errors.h"
#include "table_kernel.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelConstruction;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

constexpr int64_t kSurveyedAtATime = 1 << 16;

class LookupCountsOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "counting the lookups of"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({3}), &out));
    const kvtable::LookupCounts counts = open->table->lookup_counts();
    out->vec<int64_t>()(0) = counts.keys;
    out->vec<int64_t>()(1) = counts.born;
    out->vec<int64_t>()(2) = counts.held_back;
    return absl::OkStatus();
  }
};

// The square of a row's norm, or what is not finite.
template <class T>
double SquareOf(const T* row, int64_t dim) {
  double square = 0.0;
  for (int64_t d = 0; d < dim; ++d) {
    const double x = static_cast<double>(row[d]);
    square += x * x;
  }
  return square;
}

class SurveyOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    return ReadAttrs(ctx, "most_hot", &most_hot_, "most_nan", &most_nan_);
  }

  const char* doing() const override { return "surveying"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    TF_RETURN_IF_ERROR(CheckKeyType(open->config(), output_type(0)));
    const auto limits = ctx->input(1).vec<double>();
    if (!std::is_sorted(limits.data(), limits.data() + limits.size())) {
      return errors::InvalidArgument("limits must be in ascending order");
    }
    switch (open->config().value_dtype) {
      case tf::DT_FLOAT:
        return Survey<float>(ctx, open);
      case tf::DT_DOUBLE:
        return Survey<double>(ctx, open);
      case tf::DT_HALF:
        return Survey<Eigen::half>(ctx, open);
      case tf::DT_BFLOAT16:
        return Survey<tf::bfloat16>(ctx, open);
      default:
        return errors::InvalidArgument("Key-value variable '", open->config().name, "' holds ",
                                       tf::DataTypeString(open->config().value_dtype),
                                       ", of which there are no norms");
    }
  }

 private:
  template <class T>
  absl::Status Survey(OpKernelContext* ctx, OpenTable* open) {
    switch (open->config().key_dtype) {
      case tf::DT_INT32:
        return SurveyKeys<T, int32_t>(ctx, open);
      case tf::DT_UINT64:
        return SurveyKeys<T, uint64_t>(ctx, open);
      default:
        return SurveyKeys<T, int64_t>(ctx, open);
    }
  }

  template <class T, class Key>
  absl::Status SurveyKeys(OpKernelContext* ctx, OpenTable* open) {
    const int64_t dim = open->config().dim;
    const Tensor& limits_in = ctx->input(1);
    const double* const limits = limits_in.vec<double>().data();
    const int64_t bucket_count = limits_in.NumElements() + 1;
    Tensor rows;
    TF_RETURN_IF_ERROR(ctx->allocate_temp(open->config().value_dtype, TensorShape({kSurveyedAtATime, dim}),
                                          &rows, OnHost()));
    std::vector<Key> keys(kSurveyedAtATime);
    std::vector<uint32_t> freqs(kSurveyedAtATime);
    std::vector<int64_t> counts(static_cast<size_t>(bucket_count), 0);
    double sum = 0.0;
    double squares = 0.0;
    double least = std::numeric_limits<double>::infinity();
    double greatest = 0.0;
    int64_t nan_count = 0;
    std::vector<Key> nan_keys;
    // The least frequent of the hot ones first: a heap.
    using Hot = std::pair<uint32_t, Key>;
    const auto hotter = [](const Hot& a, const Hot& b) {
      return a.first != b.first ? a.first > b.first : a.second < b.second;
    };
    std::vector<Hot> hot;
    const std::unique_ptr<kvtable::Exporter> exporter = open->table->Export();
    for (;;) {
      kvtable::Exporter::Buffers out;
      out.keys = keys.data();
      out.freqs = freqs.data();
      out.columns = {{0, rows.data(), dim, kvtable::kAnyGeneration}};
      const int64_t n = exporter->Next(kSurveyedAtATime, out, open->threads);
      if (n == 0) break;
      const T* const values = rows.flat<T>().data();
      for (int64_t i = 0; i < n; ++i) {
        const Key key = keys[static_cast<size_t>(i)];
        const double square = SquareOf(values + i * dim, dim);
        if (!std::isfinite(square)) {
          ++nan_count;
          if (static_cast<int64_t>(nan_keys.size()) < most_nan_) nan_keys.push_back(key);
        } else {
          const double norm = std::sqrt(square);
          ++counts[static_cast<size_t>(std::lower_bound(limits, limits + bucket_count - 1, norm) - limits)];
          sum += norm;
          squares += square;
          least = std::min(least, norm);
          greatest = std::max(greatest, norm);
        }
        const Hot candidate{freqs[static_cast<size_t>(i)], key};
        if (static_cast<int64_t>(hot.size()) < most_hot_) {
          hot.push_back(candidate);
          std::push_heap(hot.begin(), hot.end(), hotter);
        } else if (most_hot_ > 0 && hotter(candidate, hot.front())) {
          std::pop_heap(hot.begin(), hot.end(), hotter);
          hot.back() = candidate;
          std::push_heap(hot.begin(), hot.end(), hotter);
        }
      }
    }
    std::sort_heap(hot.begin(), hot.end(), hotter);
    std::sort(nan_keys.begin(), nan_keys.end());

    Tensor* hot_keys = nullptr;
    Tensor* hot_freqs = nullptr;
    Tensor* buckets = nullptr;
    Tensor* moments = nullptr;
    Tensor* nan_rows = nullptr;
    Tensor* nan_out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({static_cast<int64_t>(hot.size())}), &hot_keys));
    TF_RETURN_IF_ERROR(ctx->allocate_output(1, TensorShape({static_cast<int64_t>(hot.size())}), &hot_freqs));
    TF_RETURN_IF_ERROR(ctx->allocate_output(2, TensorShape({bucket_count}), &buckets));
    TF_RETURN_IF_ERROR(ctx->allocate_output(3, TensorShape({4}), &moments));
    TF_RETURN_IF_ERROR(ctx->allocate_output(4, TensorShape({}), &nan_rows));
    TF_RETURN_IF_ERROR(
        ctx->allocate_output(5, TensorShape({static_cast<int64_t>(nan_keys.size())}), &nan_out));
    for (size_t i = 0; i < hot.size(); ++i) {
      static_cast<Key*>(hot_keys->data())[i] = hot[i].second;
      hot_freqs->vec<uint32_t>()(static_cast<int64_t>(i)) = hot[i].first;
    }
    std::copy(counts.begin(), counts.end(), buckets->vec<int64_t>().data());
    const double about[] = {sum, squares, least, greatest};
    std::copy(about, about + 4, moments->vec<double>().data());
    nan_rows->scalar<int64_t>()() = nan_count;
    if (!nan_keys.empty()) std::memcpy(nan_out->data(), nan_keys.data(), nan_keys.size() * sizeof(Key));
    return absl::OkStatus();
  }

  int64_t most_hot_ = 0;
  int64_t most_nan_ = 0;
};

class WatchGradientsOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override { return ReadAttrs(ctx, "on", &on_); }

  const char* doing() const override { return "watching the gradients of"; }

  absl::Status WorkOn(OpKernelContext*, OpenTable* open) override {
    if (on_ && open->config().gpu != nullptr) {
      return errors::FailedPrecondition("Key-value variable '", open->config().name,
                                        "' is in a GPU's memory, and so are its gradients: their norms are "
                                        "measured for tables on a CPU only");
    }
    open->resource->gradients()->set_on(on_);
    return absl::OkStatus();
  }

 private:
  bool on_ = false;
};

class GradientNormsOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  const char* doing() const override { return "reading the gradient norms of"; }

  absl::Status WorkOn(OpKernelContext* ctx, OpenTable* open) override {
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({5}), &out));
    const GradientWatch::Norms norms = open->resource->gradients()->Take();
    const double taken[] = {static_cast<double>(norms.steps), norms.sum, norms.greatest, norms.greatest_row,
                            static_cast<double>(norms.nonfinite_rows)};
    std::copy(taken, taken + 5, out->vec<double>().data());
    return absl::OkStatus();
  }
};

KVTOOLS_REGISTER(Name("KvTableLookupCounts").HostMemory("counts"), LookupCountsOp);
KVTOOLS_REGISTER(Name("KvTableSurvey")
                     .HostMemory("limits")
                     .HostMemory("hot_keys")
                     .HostMemory("hot_freqs")
                     .HostMemory("buckets")
                     .HostMemory("moments")
                     .HostMemory("nan_rows")
                     .HostMemory("nan_keys"),
                 SurveyOp);
KVTOOLS_REGISTER(Name("KvTableWatchGradients"), WatchGradientsOp);
KVTOOLS_REGISTER(Name("KvTableGradientNorms").HostMemory("norms"), GradientNormsOp);

}  // namespace
}  // namespace kvtools
