// Rectified Adam (Liu et al., arXiv 1908.03265): Adam once enough steps tell the variance of its second
// moment, momentum until then. With rho_inf = 2 / (1 - b2) - 1 and rho = rho_inf - 2 t b2^t / (1 - b2^t):
//   m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//   rho >= sma_threshold: w -= lr r * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + epsilon)
//     r^2 = (rho - 4) (rho - 2) rho_inf / ((rho_inf - 4) (rho_inf - 2) rho)
//   otherwise: w -= lr * m / (1 - b1^t)
// Nesterov: b1 m + (1 - b1) g takes the place of m in the steps of w. With amsgrad the largest v so far takes
// the place of v there: vhat = max(vhat, v).
#pragma once

#include "optimizers/rule.h"

namespace kvtable {

template <bool kAmsGrad>
struct RectifiedAdamRule {
  static constexpr const char* kName = kAmsGrad ? "radam_amsgrad" : "radam";
  static constexpr std::array<Hyperparameter, 8> kHyperparameters = {{
      {"beta_1", 0.9, Range::kFraction},
      {"beta_2", 0.999, Range::kFraction},
      {"epsilon", 1e-7, Range::kNonNegative},
      {"sma_threshold", 5.0, Range::kAny},
      {"step", Hyperparameter::kRequired, Range::kPositive},          // from 1
      {"beta_1_power", Hyperparameter::kRequired, Range::kFraction},  // beta_1 to the power of the step
      {"beta_2_power", Hyperparameter::kRequired, Range::kFraction},
      {"nesterov", 0.0, Range::kFlag},
  }};
  static constexpr std::array<OptimizerSlot, kAmsGrad ? 3 : 2> kSlots = [] {
    if constexpr (kAmsGrad) {
      return std::array<OptimizerSlot, 3>{{{"m", 0.0}, {"v", 0.0}, {"vhat", 0.0}}};
    } else {
      return std::array<OptimizerSlot, 2>{{{"m", 0.0}, {"v", 0.0}}};
    }
  }();

  template <class C>
  struct Constants {
    Constants(double lr, const double* h)
        : rest1(static_cast<C>(1 - h[0])),
          rest2(static_cast<C>(1 - h[1])),
          epsilon(static_cast<C>(h[2])),
          from_gradient(static_cast<C>(h[7] != 0 ? 1 - h[0] : 0)),
          from_moment(static_cast<C>(h[7] != 0 ? h[0] : 1)) {
      const double most = 2 / (1 - h[1]) - 1;
      const double rho = most - 2 * h[4] * h[6] / (1 - h[6]);
      rectified = rho >= h[3];
      const double r =
          rectified ? std::sqrt((rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho)) : 1.0;
      alpha = static_cast<C>(lr * r / (1 - h[5]));
      correction = static_cast<C>(1 / (1 - h[6]));
    }
    C alpha, correction, rest1, rest2, epsilon, from_gradient, from_moment;
    bool rectified;
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
    if constexpr (kAmsGrad) {
      C* __restrict const vhat = columns[3];
      for (int64_t j = row.begin(); j < row.end(); j += row.step()) vhat[j] = Larger(vhat[j], v[j]);
    }
    const C* const divisor = columns[kAmsGrad ? 3 : 2];
    if (k.rectified) {
      for (int64_t j = row.begin(); j < row.end(); j += row.step()) {
        const C step = k.from_gradient * g[j] + k.from_moment * m[j];
        w[j] -= k.alpha * step / (std::sqrt(k.correction * divisor[j]) + k.epsilon);
      }
    } else {
      for (int64_t j = row.begin(); j < row.end(); j += row.step()) {
        w[j] -= k.alpha * (k.from_gradient * g[j] + k.from_moment * m[j]);
      }
    }
    return false;
  }
};

using RectifiedAdam = RectifiedAdamRule<false>;
using RectifiedAmsGrad = RectifiedAdamRule<true>;

}  // namespace kvtable
