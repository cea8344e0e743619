#include "kvtable/optimizer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "memory/scratch.h"
#include "optimizers/rule.h"
#include "threads/run_tasks.h"
#include "training/row_updater.h"
#include "training/rule_functions.h"
#include "values/elements.h"
#include "values/random.h"

namespace kvtable {

namespace {

// Sorted by name.
const std::vector<CompiledRule>& Rules() {
  static const std::vector<CompiledRule> rules = [] {
    std::vector<CompiledRule> all = GradientRules();
    for (std::vector<CompiledRule>& more : std::array{AdamRules(), GroupRules()}) {
      all.insert(all.end(), more.begin(), more.end());
    }
    std::sort(all.begin(), all.end(), [](const CompiledRule& a, const CompiledRule& b) {
      return std::strcmp(a.spec.name, b.spec.name) < 0;
    });
    return all;
  }();
  return rules;
}

// For a message: the names, with commas.
template <class Named>
std::string NamesOf(const std::vector<Named>& all) {
  std::string names;
  for (const Named& one : all) names += names.empty() ? one.name : std::string(", ") + one.name;
  return names;
}

}  // namespace

const std::vector<OptimizerSpec>& Optimizers() {
  static const std::vector<OptimizerSpec> specs = [] {
    std::vector<OptimizerSpec> all;
    for (const CompiledRule& rule : Rules()) all.push_back(rule.spec);
    return all;
  }();
  return specs;
}

const OptimizerSpec& FindOptimizer(const std::string& name) {
  for (const OptimizerSpec& spec : Optimizers()) {
    if (name == spec.name) return spec;
  }
  throw Error(ErrorCode::kInvalidArgument,
              "There is no optimizer '" + name + "'; expected one of " + NamesOf(Optimizers()) + ".");
}

Update MakeUpdate(const std::string& optimizer,
                  const std::vector<std::pair<std::string, double>>& hyperparameters) {
  Update update;
  update.optimizer = &FindOptimizer(optimizer);
  const std::vector<Hyperparameter>& known = update.optimizer->hyperparameters;
  std::vector<bool> given(known.size());
  for (const Hyperparameter& h : known) update.hyperparameters.push_back(h.fallback);
  for (const auto& [name, value] : hyperparameters) {
    size_t i = 0;
    while (i < known.size() && name != known[i].name) ++i;
    if (i == known.size()) {
      throw Error(ErrorCode::kInvalidArgument, "Optimizer " + optimizer + " has no hyperparameter '" + name +
                                                   "'; it has " + NamesOf(known) + ".");
    }
    update.hyperparameters[i] = value;
    given[i] = true;
  }
  for (size_t i = 0; i < known.size(); ++i) {
    if (given[i] || !std::isnan(known[i].fallback)) continue;
    throw Error(ErrorCode::kInvalidArgument,
                "Optimizer " + optimizer + " needs the hyperparameter '" + known[i].name + "'.");
  }
  return update;
}

RowUpdater::RowUpdater(const Update& update, ValueType value_type, int64_t dim)
    : dim_(dim), stochastic_rounding_(update.stochastic_rounding), seed_(update.seed) {
  CheckUpdate(update);
  decay_ = update.hyperparameters[0] * update.hyperparameters[1];
  Rules()[static_cast<size_t>(update.optimizer - Optimizers().data())].prepare(this, update, value_type);
  if (value_type == ValueType::kFloat16 || value_type == ValueType::kBFloat16) {
    columns_ = 1 + update.optimizer->slots.size();
    conversion_ = BestRowConversion(value_type);
    scratch_bytes_ = columns_ * static_cast<size_t>(dim_) * sizeof(float);
  } else if (update.float32_gradients) {
    throw Error(ErrorCode::kInvalidArgument, "Only rows of 16 bits have gradients of another type: float32.");
  }
}

bool RowUpdater::UpdateConverted(void* const* columns, const void* gradient, uint64_t key,
                                 void* scratch) const {
  float* const values = static_cast<float*>(scratch);
  void* typed[kMostColumns];
  for (size_t c = 0; c < columns_; ++c) {
    float* const to = values + static_cast<int64_t>(c) * dim_;
    conversion_.load(columns[c], dim_, to);
    typed[c] = to;
  }
  const bool zeroed = function_(*this, typed, gradient);
  if (!stochastic_rounding_) {
    for (size_t c = 0; c < columns_; ++c) {
      conversion_.store(static_cast<const float*>(typed[c]), dim_, columns[c]);
    }
    return zeroed;
  }
  // Apart from the streams that initial values are drawn from.
  const uint64_t stream = RandomStream(Mix64(seed_), ~key);
  const uint64_t words = static_cast<uint64_t>(dim_ + 1) / 2;  // of a column, 32 bits for each element
  for (size_t c = 0; c < columns_; ++c) {
    conversion_.store_stochastically(static_cast<const float*>(typed[c]), dim_, stream, c * words,
                                     columns[c]);
  }
  return zeroed;
}

constexpr int64_t kBytesAhead = 8192;

GradientSum::GradientSum(const Update& update, ValueType value_type, int64_t dim) : dim_(dim) {
  const ValueType type = update.float32_gradients ? ValueType::kFloat32 : value_type;
  row_bytes_ = dim * SizeOf(type);
  ahead_ = static_cast<uint32_t>(std::clamp<int64_t>(kBytesAhead / row_bytes_, 4, 32));
  same_type_ = type == ValueType::kFloat32 || type == ValueType::kFloat64;
  VisitValueType(type, [&](auto t) {
    using C = typename Element<decltype(t)>::Compute;
    bytes_ = static_cast<size_t>(dim) * sizeof(C);
    set_ = [](const void* row, int64_t n, void* sum) {
      std::memcpy(sum, row, static_cast<size_t>(n) * sizeof(C));
    };
    add_ = BestAddIndexedRows(std::is_same_v<C, double>);
    is_finite_ = [](const void* sum, int64_t n) {
      return LaneSum<C>(WholeRow{n}, [=](int64_t j) { return static_cast<const C*>(sum)[j] * C{0}; }) == C{0};
    };
  });
  if (!same_type_) conversion_ = BestRowConversion(type);
}

ApplyCounts ApplyToArrays(const Update& update, ValueType value_type, int64_t dim,
                          const std::vector<void*>& columns, const int64_t* rows, int64_t n,
                          const void* gradients, ParallelFor& threads) {
  CheckColumns(update, columns.size());
  const RowUpdater updater(update, value_type, dim);
  const GradientSum sum(update, value_type, dim);
  const int64_t row_bytes = dim * SizeOf(value_type);
  const Ranges ranges(n, std::max<int64_t>(1, 16384 / dim), threads);
  Scratch<int64_t> skipped(static_cast<size_t>(ranges.count()));
  RunTasks(threads, ranges.count(), [&](int64_t r) {
    Scratch<uint64_t> scratch(updater.scratch_bytes() / 8 + 1);
    Scratch<uint64_t> summed(sum.bytes() / 8 + 1);
    std::vector<void*> at(columns.size());
    int64_t& count = skipped[static_cast<size_t>(r)];
    count = 0;
    for (int64_t i = ranges.begin(r); i < ranges.end(r); ++i) {
      const int64_t row = rows == nullptr ? i : rows[i];
      const void* gradient = static_cast<const char*>(gradients) + i * sum.row_bytes();
      if (!sum.same_type()) {
        sum.Set(summed.data(), gradient);
        gradient = summed.data();
      }
      if (update.skip_nonfinite && !sum.IsFinite(gradient)) {
        ++count;
        continue;
      }
      for (size_t c = 0; c < columns.size(); ++c) at[c] = static_cast<char*>(columns[c]) + row * row_bytes;
      updater(at.data(), gradient, static_cast<uint64_t>(row), scratch.data());
    }
  });
  ApplyCounts counts;
  for (int64_t r = 0; r < ranges.count(); ++r) counts.skipped += skipped[static_cast<size_t>(r)];
  counts.updated = n - counts.skipped;
  return counts;
}

}  // namespace kvtable
