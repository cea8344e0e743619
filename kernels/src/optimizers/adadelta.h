// Adadelta (Zeiler, arXiv 1212.5701):
//   a = rho a + (1 - rho) g^2;  d = sqrt(u + epsilon) / sqrt(a + epsilon) * g
//   u = rho u + (1 - rho) d^2;  w -= lr d
#pragma once

#include "optimizers/rule.h"

namespace kvtable {

struct Adadelta {
  static constexpr const char* kName = "adadelta";
  static constexpr std::array<Hyperparameter, 2> kHyperparameters = {{
      {"rho", 0.95, Range::kUnit},
      {"epsilon", 1e-7, Range::kNonNegative},
  }};
  static constexpr std::array<OptimizerSlot, 2> kSlots = {{{"accum", 0.0}, {"accum_update", 0.0}}};

  template <class C>
  struct Constants {
    Constants(double lr, const double* h)
        : lr(static_cast<C>(lr)),
          rho(static_cast<C>(h[0])),
          rest(static_cast<C>(1 - h[0])),
          epsilon(static_cast<C>(h[1])) {}
    C lr, rho, rest, epsilon;
  };

  template <class C, class Row>
  KVTABLE_RULE_FUNCTION static bool Update(Constants<C> k, Row row, C* const* columns, const C* gradient) {
    C* __restrict const w = columns[0];
    C* __restrict const a = columns[1];
    C* __restrict const u = columns[2];
    const C* __restrict const g = gradient;
    for (int64_t j = row.begin(); j < row.end(); j += row.step()) {
      a[j] = k.rho * a[j] + k.rest * (g[j] * g[j]);
      const C d = std::sqrt(u[j] + k.epsilon) / std::sqrt(a[j] + k.epsilon) * g[j];
      u[j] = k.rho * u[j] + k.rest * (d * d);
      w[j] -= k.lr * d;
    }
    return false;
  }
};

}  // namespace kvtable
