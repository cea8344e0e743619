// Adam (Kingma and Ba, arXiv 1412.6980), with epsilon added to the uncorrected root as TensorFlow does:
//   m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//   w -= lr sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + epsilon)
#pragma once

#include "optimizers/rule.h"

namespace kvtable {

struct Adam {
  static constexpr const char* kName = "adam";
  static constexpr std::array<Hyperparameter, 5> kHyperparameters = {{
      {"beta_1", 0.9, Range::kFraction},
      {"beta_2", 0.999, Range::kFraction},
      {"epsilon", 1e-7, Range::kNonNegative},
      {"beta_1_power", Hyperparameter::kRequired,
       Range::kFraction},  // beta_1 to the power of the step, from 1
      {"beta_2_power", Hyperparameter::kRequired, Range::kFraction},
  }};
  static constexpr std::array<OptimizerSlot, 2> kSlots = {{{"m", 0.0}, {"v", 0.0}}};

  template <class C>
  struct Constants {
    Constants(double lr, const double* h)
        : alpha(static_cast<C>(lr * std::sqrt(1 - h[4]) / (1 - h[3]))),
          rest1(static_cast<C>(1 - h[0])),
          rest2(static_cast<C>(1 - h[1])),
          epsilon(static_cast<C>(h[2])) {}
    C alpha, rest1, rest2, epsilon;
  };

  template <class C, class Row>
  KVTABLE_RULE_FUNCTION static bool Update(Constants<C> k, Row row, C* const* columns, const C* gradient) {
    C* __restrict const w = columns[0];
    C* __restrict const m = columns[1];
    C* __restrict const v = columns[2];
    const C* __restrict const g = gradient;
    for (int64_t j = row.begin(); j < row.end(); j += row.step()) {
      m[j] += (g[j] - m[j]) * k.rest1;
      v[j] += (g[j] * g[j] - v[j]) * k.rest2;
      w[j] -= k.alpha * m[j] / (std::sqrt(v[j]) + k.epsilon);
    }
    return false;
  }
};

}  // namespace kvtable
