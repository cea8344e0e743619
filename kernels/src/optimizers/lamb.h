// LAMB (You et al., arXiv 1904.00962) with the norms of one row, as a table has them:
//   m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//   u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + epsilon) + lamb_weight_decay w
//   w -= lr |w| / |u| * u;  a norm that is zero counts as if both were one
// Keras decays weights before the update: that is the common weight_decay. The paper decays them within u:
// that is lamb_weight_decay.
#pragma once

#include "optimizers/rule.h"

namespace kvtable {

// |w| / |u|, one where either is zero.
template <class C>
KVTABLE_RULE_FUNCTION inline C TrustRatio(C w_squares, C u_squares) {
  return w_squares > C{0} && u_squares > C{0} ? std::sqrt(w_squares) / std::sqrt(u_squares) : C{1};
}

struct Lamb {
  static constexpr const char* kName = "lamb";
  static constexpr bool kCouplesElements = true;
  static constexpr std::array<Hyperparameter, 6> kHyperparameters = {{
      {"beta_1", 0.9, Range::kFraction},
      {"beta_2", 0.999, Range::kFraction},
      {"epsilon", 1e-7, Range::kNonNegative},
      {"beta_1_power", Hyperparameter::kRequired,
       Range::kFraction},  // beta_1 to the power of the step, from 1
      {"beta_2_power", Hyperparameter::kRequired, Range::kFraction},
      {"lamb_weight_decay", 0.0, Range::kNonNegative},
  }};
  static constexpr std::array<OptimizerSlot, 2> kSlots = {{{"m", 0.0}, {"v", 0.0}}};

  template <class C>
  struct Constants {
    Constants(double lr, const double* h)
        : lr(static_cast<C>(lr)),
          correction1(static_cast<C>(1 / (1 - h[3]))),
          correction2(static_cast<C>(1 / (1 - h[4]))),
          rest1(static_cast<C>(1 - h[0])),
          rest2(static_cast<C>(1 - h[1])),
          epsilon(static_cast<C>(h[2])),
          decay(static_cast<C>(h[5])) {}
    C lr, correction1, correction2, rest1, rest2, epsilon, decay;
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
    }
    const auto update = [=](int64_t j) KVTABLE_ALWAYS_INLINE {
      return k.correction1 * m[j] / (std::sqrt(k.correction2 * v[j]) + k.epsilon) + k.decay * w[j];
    };
    const C w_squares = LaneSum<C>(row, [=](int64_t j) KVTABLE_ALWAYS_INLINE { return w[j] * w[j]; });
    const C u_squares = LaneSum<C>(row, [=](int64_t j) KVTABLE_ALWAYS_INLINE {
      const C u = update(j);
      return u * u;
    });
    const C rate = k.lr * TrustRatio(w_squares, u_squares);
    for (int64_t j = row.begin(); j < row.end(); j += row.step()) w[j] -= rate * update(j);
    return false;
  }
};

}  // namespace kvtable
