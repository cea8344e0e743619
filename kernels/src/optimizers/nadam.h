// Nadam (Dozat, ICLR workshop 2016). The momentum schedule is the caller's, in three factors of the step:
//   m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//   w -= lr (m_factor m + g_factor g) / (sqrt(v_factor v) + epsilon)
// With u(t) = b1 (1 - 0.96^t / 2), in which tf_keras's legacy Nadam has 0.96^(t schedule_decay), and U(t) the
// product u(1) ... u(t), Keras's step t = 1, 2, ... is
//   m_factor = u(t + 1) / (1 - U(t + 1));  g_factor = (1 - u(t)) / (1 - U(t));  v_factor = 1 / (1 - b2^t)
#pragma once

#include "optimizers/rule.h"

namespace kvtable {

struct Nadam {
  static constexpr const char* kName = "nadam";
  static constexpr std::array<Hyperparameter, 6> kHyperparameters = {{
      {"beta_1", 0.9, Range::kFraction},
      {"beta_2", 0.999, Range::kFraction},
      {"epsilon", 1e-7, Range::kNonNegative},
      {"m_factor", Hyperparameter::kRequired, Range::kAny},
      {"g_factor", Hyperparameter::kRequired, Range::kAny},
      {"v_factor", Hyperparameter::kRequired, Range::kNonNegative},
  }};
  static constexpr std::array<OptimizerSlot, 2> kSlots = {{{"m", 0.0}, {"v", 0.0}}};

  template <class C>
  struct Constants {
    Constants(double lr, const double* h)
        : m_rate(static_cast<C>(lr * h[3])),
          g_rate(static_cast<C>(lr * h[4])),
          v_factor(static_cast<C>(h[5])),
          rest1(static_cast<C>(1 - h[0])),
          rest2(static_cast<C>(1 - h[1])),
          epsilon(static_cast<C>(h[2])) {}
    C m_rate, g_rate, v_factor, rest1, rest2, epsilon;
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
      w[j] -= (k.m_rate * m[j] + k.g_rate * g[j]) / (std::sqrt(k.v_factor * v[j]) + k.epsilon);
    }
    return false;
  }
};

}  // namespace kvtable
