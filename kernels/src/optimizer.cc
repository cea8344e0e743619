#include "kvtable/optimizer.h"

#include <cmath>
#include <cstring>
#include <new>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "elements.h"
#include "instruction_set.h"
#include "optimizers/adam.h"
#include "optimizers/sgd.h"
#include "row_updater.h"
#include "run_tasks.h"
#include "scratch.h"

namespace kvtable {

// One function per rule, value type and instruction set.
template <class Rule>
struct RuleFunctions {
  template <class T>
  KVTABLE_ALWAYS_INLINE static bool Run(const RowUpdater& step, void* const* columns, const void* gradient,
                                        uint64_t key, void* scratch) {
    using C = typename Element<T>::Compute;
    constexpr size_t kColumns = 1 + Rule::kSlots.size();
    const int64_t dim = step.dim_;
    C* typed[kColumns];
    for (size_t c = 0; c < kColumns; ++c) {
      if constexpr (std::is_same_v<T, C>) {
        typed[c] = static_cast<C*>(columns[c]);
      } else {  // 16 bits: to float32 and, below, back
        typed[c] = static_cast<C*>(scratch) + static_cast<int64_t>(c) * dim;
        const T* const from = static_cast<const T*>(columns[c]);
        for (int64_t j = 0; j < dim; ++j) typed[c][j] = Element<T>::Load(from[j]);
      }
    }
    if (step.decay_ != 0) {
      const C decay = static_cast<C>(step.decay_);
      for (int64_t j = 0; j < dim; ++j) typed[0][j] -= typed[0][j] * decay;
    }
    typename Rule::template Constants<C> constants =
        *std::launder(reinterpret_cast<const typename Rule::template Constants<C>*>(step.constants_));
    const bool zeroed = Rule::template Update<C>(constants, dim, typed, static_cast<const C*>(gradient));
    if constexpr (!std::is_same_v<T, C>) {
      (void)key;
      for (size_t c = 0; c < kColumns; ++c) {
        T* const to = static_cast<T*>(columns[c]);
        for (int64_t j = 0; j < dim; ++j) to[j] = Element<T>::Store(typed[c][j]);
      }
    } else {
      (void)key;
      (void)scratch;
    }
    return zeroed;
  }

  template <class T>
  static bool Baseline(const RowUpdater& step, void* const* columns, const void* gradient, uint64_t key,
                       void* scratch) {
    return Run<T>(step, columns, gradient, key, scratch);
  }
#if defined(__x86_64__)
  template <class T>
  KVTABLE_TARGET_AVX2 static bool Avx2(const RowUpdater& step, void* const* columns, const void* gradient,
                                       uint64_t key, void* scratch) {
    return Run<T>(step, columns, gradient, key, scratch);
  }
  template <class T>
  KVTABLE_TARGET_AVX512 static bool Avx512(const RowUpdater& step, void* const* columns, const void* gradient,
                                           uint64_t key, void* scratch) {
    return Run<T>(step, columns, gradient, key, scratch);
  }
#endif

  template <class T>
  static RowUpdater::Function Best() {
#if defined(__x86_64__)
    switch (BestInstructionSet()) {
      case InstructionSet::kAvx512:
        return Avx512<T>;
      case InstructionSet::kAvx2:
        return Avx2<T>;
      case InstructionSet::kBaseline:
        break;
    }
#endif
    return Baseline<T>;
  }

  static void Prepare(RowUpdater* step, const Update& update, ValueType value_type) {
    VisitValueType(value_type, [&](auto t) {
      using T = decltype(t);
      using C = typename Element<T>::Compute;
      using Constants = typename Rule::template Constants<C>;
      static_assert(sizeof(Constants) <= RowUpdater::kMostConstantBytes);
      static_assert(std::is_trivially_copyable_v<Constants>);
      new (step->constants_) Constants(update.hyperparameters[0], update.hyperparameters.data() + 2);
      step->function_ = Best<T>();
      if (!std::is_same_v<T, C>) {
        step->scratch_bytes_ = (1 + Rule::kSlots.size()) * static_cast<size_t>(step->dim_) * sizeof(C);
      }
    });
  }

  static OptimizerSpec Spec() {
    OptimizerSpec spec;
    spec.name = Rule::kName;
    spec.hyperparameters = {{"learning_rate", Hyperparameter::kRequired, Range::kAny},
                            {"weight_decay", 0.0, Range::kNonNegative}};
    spec.hyperparameters.insert(spec.hyperparameters.end(), Rule::kHyperparameters.begin(),
                                Rule::kHyperparameters.end());
    for (const Hyperparameter& h : Rule::kHyperparameters)
      spec.zeroes_rows |= std::strcmp(h.name, "l21") == 0;
    spec.slots.assign(Rule::kSlots.begin(), Rule::kSlots.end());
    return spec;
  }
};

namespace {

using Rules = std::tuple<Adam, Sgd>;

template <size_t... I>
std::vector<OptimizerSpec> Specs(std::index_sequence<I...>) {
  return {RuleFunctions<std::tuple_element_t<I, Rules>>::Spec()...};
}

using Prepare = void (*)(RowUpdater*, const Update&, ValueType);
template <size_t... I>
std::vector<Prepare> Prepares(std::index_sequence<I...>) {
  return {RuleFunctions<std::tuple_element_t<I, Rules>>::Prepare...};
}

constexpr auto kEvery = std::make_index_sequence<std::tuple_size_v<Rules>>{};

bool InRange(double x, Range range) {
  if (!std::isfinite(x)) return false;
  switch (range) {
    case Range::kAny:
      return true;
    case Range::kNonNegative:
      return x >= 0;
    case Range::kPositive:
      return x > 0;
    case Range::kFraction:
      return x >= 0 && x < 1;
    case Range::kUnit:
      return x >= 0 && x <= 1;
    case Range::kFlag:
      return x == 0 || x == 1;
  }
  return false;
}

const char* Describe(Range range) {
  switch (range) {
    case Range::kAny:
      return "a finite number";
    case Range::kNonNegative:
      return "0 or more";
    case Range::kPositive:
      return "more than 0";
    case Range::kFraction:
      return "at least 0 and less than 1";
    case Range::kUnit:
      return "0 to 1";
    case Range::kFlag:
      return "0 or 1";
  }
  return "";
}

}  // namespace

const std::vector<OptimizerSpec>& Optimizers() {
  static const std::vector<OptimizerSpec> specs = Specs(kEvery);
  return specs;
}

const OptimizerSpec& FindOptimizer(const std::string& name) {
  std::string names;
  for (const OptimizerSpec& spec : Optimizers()) {
    if (name == spec.name) return spec;
    names += names.empty() ? spec.name : std::string(", ") + spec.name;
  }
  throw Error(ErrorCode::kInvalidArgument,
              "There is no optimizer '" + name + "'; expected one of " + names + ".");
}

Update MakeUpdate(const std::string& optimizer,
                  const std::vector<std::pair<std::string, double>>& hyperparameters) {
  Update update;
  update.optimizer = &FindOptimizer(optimizer);
  const std::vector<Hyperparameter>& known = update.optimizer->hyperparameters;
  std::vector<bool> given(known.size());
  std::string names;
  for (const Hyperparameter& h : known) {
    update.hyperparameters.push_back(h.fallback);
    names += names.empty() ? h.name : std::string(", ") + h.name;
  }
  for (const auto& [name, value] : hyperparameters) {
    size_t i = 0;
    while (i < known.size() && name != known[i].name) ++i;
    if (i == known.size()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "Optimizer " + optimizer + " has no hyperparameter '" + name + "'; it has " + names + ".");
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

void CheckUpdate(const Update& update) {
  const OptimizerSpec& spec = *update.optimizer;
  if (update.hyperparameters.size() != spec.hyperparameters.size()) {
    throw Error(ErrorCode::kInvalidArgument, std::string("Optimizer ") + spec.name + " got " +
                                                 std::to_string(update.hyperparameters.size()) +
                                                 " hyperparameters; expected " +
                                                 std::to_string(spec.hyperparameters.size()) + ".");
  }
  for (size_t i = 0; i < spec.hyperparameters.size(); ++i) {
    const Hyperparameter& h = spec.hyperparameters[i];
    if (InRange(update.hyperparameters[i], h.range)) continue;
    throw Error(ErrorCode::kInvalidArgument, std::string("Optimizer ") + spec.name + " got " + h.name +
                                                 " = " + std::to_string(update.hyperparameters[i]) +
                                                 "; expected " + Describe(h.range) + ".");
  }
}

RowUpdater::RowUpdater(const Update& update, ValueType value_type, int64_t dim)
    : dim_(dim), stochastic_rounding_(update.stochastic_rounding), seed_(update.seed) {
  CheckUpdate(update);
  decay_ = update.hyperparameters[0] * update.hyperparameters[1];
  static const std::vector<Prepare> prepares = Prepares(kEvery);
  prepares[static_cast<size_t>(update.optimizer - Optimizers().data())](this, update, value_type);
}

GradientSum::GradientSum(ValueType value_type, int64_t dim) : dim_(dim) {
  VisitValueType(value_type, [&](auto t) {
    using T = decltype(t);
    using C = typename Element<T>::Compute;
    same_type_ = std::is_same_v<T, C>;
    bytes_ = static_cast<size_t>(dim) * sizeof(C);
    set_ = [](void* sum, const void* row, int64_t n) {
      for (int64_t j = 0; j < n; ++j)
        static_cast<C*>(sum)[j] = Element<T>::Load(static_cast<const T*>(row)[j]);
    };
    add_ = [](void* sum, const void* row, int64_t n) {
      for (int64_t j = 0; j < n; ++j)
        static_cast<C*>(sum)[j] += Element<T>::Load(static_cast<const T*>(row)[j]);
    };
    is_finite_ = [](const void* sum, int64_t n) {
      return LaneSum<C>(n, [=](int64_t j) { return static_cast<const C*>(sum)[j] * C{0}; }) == C{0};
    };
  });
}

ApplyCounts ApplyToArrays(const Update& update, ValueType value_type, int64_t dim,
                          const std::vector<void*>& columns, const int64_t* rows, int64_t n,
                          const void* gradients, ParallelFor& threads) {
  if (columns.size() != 1 + update.optimizer->slots.size()) {
    throw Error(ErrorCode::kInvalidArgument, std::string("Optimizer ") + update.optimizer->name + " keeps " +
                                                 std::to_string(update.optimizer->slots.size()) +
                                                 " slots; got " + std::to_string(columns.size() - 1) + ".");
  }
  const RowUpdater updater(update, value_type, dim);
  const GradientSum sum(value_type, dim);
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
      const void* gradient = static_cast<const char*>(gradients) + i * row_bytes;
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
