// A rule compiled: one function per compute type and instruction set, and the choice among them.
#pragma once

#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

#include "base/instruction_set.h"
#include "optimizers/rule.h"
#include "training/row_updater.h"
#include "values/elements.h"

namespace kvtable {

// A rule as the list of optimizers holds it.
struct CompiledRule {
  OptimizerSpec spec;
  void (*prepare)(RowUpdater* updater, const Update& update, ValueType value_type);
};

template <class Rule>
struct RuleFunctions {
  template <class C>
  using Constants = typename Rule::template Constants<C>;

  template <class C>
  KVTABLE_ALWAYS_INLINE static bool Run(const RowUpdater& updater, void* const* columns,
                                        const void* gradient) {
    constexpr size_t kColumns = 1 + Rule::kSlots.size();
    C* typed[kColumns];
    for (size_t c = 0; c < kColumns; ++c) typed[c] = static_cast<C*>(columns[c]);
    if (!kDecaysItself<Rule, C> && updater.decay_ != 0) {
      const C decay = static_cast<C>(updater.decay_);
      C* __restrict const w = typed[0];
      for (int64_t j = 0; j < updater.dim_; ++j) w[j] -= w[j] * decay;
    }
    const Constants<C> constants = *std::launder(reinterpret_cast<const Constants<C>*>(updater.constants_));
    return Rule::template Update<C>(constants, WholeRow{updater.dim_}, typed,
                                    static_cast<const C*>(gradient));
  }

  template <class C>
  static bool Baseline(const RowUpdater& updater, void* const* columns, const void* gradient) {
    return Run<C>(updater, columns, gradient);
  }
#if defined(__x86_64__)
  template <class C>
  KVTABLE_TARGET_AVX2 static bool Avx2(const RowUpdater& updater, void* const* columns,
                                       const void* gradient) {
    return Run<C>(updater, columns, gradient);
  }
  template <class C>
  KVTABLE_TARGET_AVX512 static bool Avx512(const RowUpdater& updater, void* const* columns,
                                           const void* gradient) {
    return Run<C>(updater, columns, gradient);
  }
#endif

  template <class C>
  static RowUpdater::Function Best() {
#if defined(__x86_64__)
    switch (BestInstructionSet()) {
      case InstructionSet::kAvx512:
        return Avx512<C>;
      case InstructionSet::kAvx2:
        return Avx2<C>;
      case InstructionSet::kBaseline:
        break;
    }
#endif
    return Baseline<C>;
  }

  static void Prepare(RowUpdater* updater, const Update& update, ValueType value_type) {
    VisitValueType(value_type, [&](auto t) {
      using C = typename Element<decltype(t)>::Compute;
      static_assert(sizeof(Constants<C>) <= RowUpdater::kMostConstantBytes);
      static_assert(std::is_trivially_copyable_v<Constants<C>>);
      new (updater->constants_) Constants<C>(MakeConstants<Rule, C>(update));
      updater->function_ = Best<C>();
    });
  }

  // kAny where the rule does not say what it needs.
  template <class R>
  static constexpr auto LearningRate(const R*) -> decltype(R::kLearningRate) {
    return R::kLearningRate;
  }
  static constexpr Range LearningRate(const void*) { return Range::kAny; }

  static OptimizerSpec Spec() {
    OptimizerSpec spec;
    spec.name = Rule::kName;
    spec.hyperparameters = {
        {"learning_rate", Hyperparameter::kRequired, LearningRate(static_cast<const Rule*>(nullptr))},
        {"weight_decay", 0.0, Range::kNonNegative}};
    spec.hyperparameters.insert(spec.hyperparameters.end(), Rule::kHyperparameters.begin(),
                                Rule::kHyperparameters.end());
    for (const Hyperparameter& h : Rule::kHyperparameters)
      spec.zeroes_rows |= std::strcmp(h.name, "l21") == 0;
    spec.slots.assign(Rule::kSlots.begin(), Rule::kSlots.end());
    return spec;
  }
};

template <class... Rules>
std::vector<CompiledRule> Compile(RuleList<Rules...>) {
  return {{RuleFunctions<Rules>::Spec(), RuleFunctions<Rules>::Prepare}...};
}

// Every rule there is, in several files, because each takes a while to compile.
std::vector<CompiledRule> GradientRules();
std::vector<CompiledRule> AdamRules();
std::vector<CompiledRule> GroupRules();

}  // namespace kvtable
