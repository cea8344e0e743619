// Adamax (Kingma and Ba, arXiv 1412.6980, section 7.1):
//   m = b1 m + (1 - b1) g;  u = max(b2 u, |g|);  w -= lr / (1 - b1^t) * m / (u + epsilon)
#pragma once

#include "optimizers/rule.h"

namespace kvtable {

struct Adamax {
  static constexpr const char* kName = "adamax";
  static constexpr std::array<Hyperparameter, 4> kHyperparameters = {{
      {"beta_1", 0.9, Range::kFraction},
      {"beta_2", 0.999, Range::kFraction},
      {"epsilon", 1e-7, Range::kNonNegative},
      {"beta_1_power", Hyperparameter::kRequired,
       Range::kFraction},  // beta_1 to the power of the step, from 1
  }};
  static constexpr std::array<OptimizerSlot, 2> kSlots = {{{"m", 0.0}, {"u", 0.0}}};

  template <class C>
  struct Constants {
    Constants(double lr, const double* h)
        : alpha(static_cast<C>(lr / (1 - h[3]))),
          rest1(static_cast<C>(1 - h[0])),
          beta2(static_cast<C>(h[1])),
          epsilon(static_cast<C>(h[2])) {}
    C alpha, rest1, beta2, epsilon;
  };

  template <class C, class Row>
  KVTABLE_RULE_FUNCTION static bool Update(Constants<C> k, Row row, C* const* columns, const C* gradient) {
    C* __restrict const w = columns[0];
    C* __restrict const m = columns[1];
    C* __restrict const u = columns[2];
    const C* __restrict const g = gradient;
    for (int64_t j = row.begin(); j < row.end(); j += row.step()) {
      m[j] += (g[j] - m[j]) * k.rest1;
      u[j] = Larger(k.beta2 * u[j], std::fabs(g[j]));
      w[j] -= k.alpha * m[j] / (u[j] + k.epsilon);
    }
    return false;
  }
};

}  // namespace kvtable
