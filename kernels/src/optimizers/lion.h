// Lion (Chen et al., arXiv 2302.06675):
//   w -= lr sign(b1 m + (1 - b1) g);  m = b2 m + (1 - b2) g
#pragma once

#include "optimizers/rule.h"

namespace kvtable {

struct Lion {
  static constexpr const char* kName = "lion";
  static constexpr std::array<Hyperparameter, 2> kHyperparameters = {{
      {"beta_1", 0.9, Range::kUnit},
      {"beta_2", 0.99, Range::kUnit},
  }};
  static constexpr std::array<OptimizerSlot, 1> kSlots = {{{"m", 0.0}}};

  template <class C>
  struct Constants {
    Constants(double lr, const double* h)
        : lr(static_cast<C>(lr)),
          beta1(static_cast<C>(h[0])),
          rest1(static_cast<C>(1 - h[0])),
          beta2(static_cast<C>(h[1])),
          rest2(static_cast<C>(1 - h[1])) {}
    C lr, beta1, rest1, beta2, rest2;
  };

  template <class C, class Row>
  KVTABLE_RULE_FUNCTION static bool Update(Constants<C> k, Row row, C* const* columns, const C* gradient) {
    C* __restrict const w = columns[0];
    C* __restrict const m = columns[1];
    const C* __restrict const g = gradient;
    for (int64_t j = row.begin(); j < row.end(); j += row.step()) {
      w[j] -= k.lr * Sign(k.beta1 * m[j] + k.rest1 * g[j]);
      m[j] = k.beta2 * m[j] + k.rest2 * g[j];
    }
    return false;
  }
};

}  // namespace kvtable
