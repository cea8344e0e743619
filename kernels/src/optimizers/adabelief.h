// AdaBelief (Zhuang et al., arXiv 2010.07468, algorithm 2): Adam that divides by how far gradients are from
// their mean. Epsilon is added to s at each step, too:
//   m = b1 m + (1 - b1) g;  s = b2 s + (1 - b2) (g - m)^2 + epsilon
//   w -= lr * m / (1 - b1^t) / (sqrt(s / (1 - b2^t)) + epsilon)
#pragma once

#include "optimizers/rule.h"

namespace kvtable {

struct AdaBelief {
  static constexpr const char* kName = "adabelief";
  static constexpr std::array<Hyperparameter, 5> kHyperparameters = {{
      {"beta_1", 0.9, Range::kFraction},
      {"beta_2", 0.999, Range::kFraction},
      {"epsilon", 1e-16, Range::kNonNegative},
      {"beta_1_power", Hyperparameter::kRequired,
       Range::kFraction},  // beta_1 to the power of the step, from 1
      {"beta_2_power", Hyperparameter::kRequired, Range::kFraction},
  }};
  static constexpr std::array<OptimizerSlot, 2> kSlots = {{{"m", 0.0}, {"s", 0.0}}};

  template <class C>
  struct Constants {
    Constants(double lr, const double* h)
        : alpha(static_cast<C>(lr / (1 - h[3]))),
          correction(static_cast<C>(1 / (1 - h[4]))),
          rest1(static_cast<C>(1 - h[0])),
          beta2(static_cast<C>(h[1])),
          rest2(static_cast<C>(1 - h[1])),
          epsilon(static_cast<C>(h[2])) {}
    C alpha, correction, rest1, beta2, rest2, epsilon;
  };

  template <class C, class Row>
  KVTABLE_RULE_FUNCTION static bool Update(Constants<C> k, Row row, C* const* columns, const C* gradient) {
    C* __restrict const w = columns[0];
    C* __restrict const m = columns[1];
    C* __restrict const s = columns[2];
    const C* __restrict const g = gradient;
    for (int64_t j = row.begin(); j < row.end(); j += row.step()) {
      m[j] += (g[j] - m[j]) * k.rest1;
      const C surprise = g[j] - m[j];
      s[j] = k.beta2 * s[j] + k.rest2 * (surprise * surprise) + k.epsilon;
      w[j] -= k.alpha * m[j] / (std::sqrt(k.correction * s[j]) + k.epsilon);
    }
    return false;
  }
};

}  // namespace kvtable
