// Adagrad with dual averaging (Duchi, Hazan and Singer, JMLR 12, 2011). The value is a function of the sums
// alone, so what it started from is forgotten at the first update:
//   z += g;  n += g^2;  w = -lr sign(z) max(|z| - l1 step, 0) / (sqrt(n) + lr l2 step)
#pragma once

#include "optimizers/rule.h"

namespace kvtable {

struct AdagradDA {
  static constexpr const char* kName = "adagrad_da";
  static constexpr std::array<Hyperparameter, 3> kHyperparameters = {{
      {"l1", 0.0, Range::kNonNegative},
      {"l2", 0.0, Range::kNonNegative},
      {"step", Hyperparameter::kRequired, Range::kPositive},  // from 1
  }};
  static constexpr std::array<OptimizerSlot, 2> kSlots = {
      {{"gradient_accumulator", 0.0}, {"gradient_squared_accumulator", 0.1}}};

  template <class C>
  struct Constants {
    Constants(double lr, const double* h)
        : lr(static_cast<C>(lr)), l1(static_cast<C>(h[0] * h[2])), l2(static_cast<C>(lr * h[1] * h[2])) {}
    C lr, l1, l2;
  };

  template <class C, class Row>
  KVTABLE_RULE_FUNCTION static bool Update(Constants<C> k, Row row, C* const* columns, const C* gradient) {
    C* __restrict const w = columns[0];
    C* __restrict const z = columns[1];
    C* __restrict const n = columns[2];
    const C* __restrict const g = gradient;
    for (int64_t j = row.begin(); j < row.end(); j += row.step()) {
      z[j] += g[j];
      n[j] += g[j] * g[j];
      w[j] = -k.lr * Shrink(z[j], k.l1) / (std::sqrt(n[j]) + k.l2);
    }
    return false;
  }
};

}  // namespace kvtable
