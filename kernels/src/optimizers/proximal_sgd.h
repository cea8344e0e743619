// Gradient descent with a proximal step (FOBOS; Duchi and Singer, JMLR 10, 2009), with lr * g taken first:
//   p = w - lr g;  w = sign(p) max(|p| - lr l1, 0) / (1 + lr l2)
#pragma once

#include "optimizers/rule.h"

namespace kvtable {

struct ProximalSgd {
  static constexpr const char* kName = "proximal_sgd";
  static constexpr std::array<Hyperparameter, 2> kHyperparameters = {{
      {"l1", 0.0, Range::kNonNegative},
      {"l2", 0.0, Range::kNonNegative},
  }};
  static constexpr std::array<OptimizerSlot, 0> kSlots = {};

  template <class C>
  struct Constants {
    Constants(double lr, const double* h)
        : lr(static_cast<C>(lr)), l1(static_cast<C>(lr * h[0])), divisor(static_cast<C>(1 + lr * h[1])) {}
    C lr, l1, divisor;
  };

  template <class C, class Row>
  KVTABLE_RULE_FUNCTION static bool Update(Constants<C> k, Row row, C* const* columns, const C* gradient) {
    C* __restrict const w = columns[0];
    const C* __restrict const g = gradient;
    for (int64_t j = row.begin(); j < row.end(); j += row.step())
      w[j] = Shrink(w[j] - k.lr * g[j], k.l1) / k.divisor;
    return false;
  }
};

}  // namespace kvtable
