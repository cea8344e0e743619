// Adagrad with a proximal step (FOBOS; Duchi and Singer, JMLR 10, 2009):
//   a += g^2;  r = lr / sqrt(a);  p = w - r g;  w = sign(p) max(|p| - r l1, 0) / (1 + r l2)
#pragma once

#include "optimizers/rule.h"

namespace kvtable {

struct ProximalAdagrad {
  static constexpr const char* kName = "proximal_adagrad";
  static constexpr std::array<Hyperparameter, 2> kHyperparameters = {{
      {"l1", 0.0, Range::kNonNegative},
      {"l2", 0.0, Range::kNonNegative},
  }};
  static constexpr std::array<OptimizerSlot, 1> kSlots = {{{"accumulator", 0.1}}};

  template <class C>
  struct Constants {
    Constants(double lr, const double* h)
        : lr(static_cast<C>(lr)), l1(static_cast<C>(h[0])), l2(static_cast<C>(h[1])) {}
    C lr, l1, l2;
  };

  template <class C, class Row>
  KVTABLE_RULE_FUNCTION static bool Update(Constants<C> k, Row row, C* const* columns, const C* gradient) {
    C* __restrict const w = columns[0];
    C* __restrict const a = columns[1];
    const C* __restrict const g = gradient;
    for (int64_t j = row.begin(); j < row.end(); j += row.step()) {
      a[j] += g[j] * g[j];
      const C rate = k.lr / std::sqrt(a[j]);
      w[j] = Shrink(w[j] - rate * g[j], rate * k.l1) / (C{1} + rate * k.l2);
    }
    return false;
  }
};

}  // namespace kvtable
