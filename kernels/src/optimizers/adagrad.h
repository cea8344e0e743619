// Adagrad (Duchi, Hazan and Singer, JMLR 12, 2011):
//   a += g^2;  w -= lr g / (sqrt(a + epsilon_inside) + epsilon)
// TensorFlow 1 has no epsilon; Keras has it inside of the root, its legacy optimizer outside.
#pragma once

#include "optimizers/rule.h"

namespace kvtable {

struct Adagrad {
  static constexpr const char* kName = "adagrad";
  static constexpr std::array<Hyperparameter, 2> kHyperparameters = {{
      {"epsilon", 0.0, Range::kNonNegative},
      {"epsilon_inside", 0.0, Range::kNonNegative},
  }};
  static constexpr std::array<OptimizerSlot, 1> kSlots = {{{"accumulator", 0.1}}};

  template <class C>
  struct Constants {
    Constants(double lr, const double* h)
        : lr(static_cast<C>(lr)), epsilon(static_cast<C>(h[0])), inside(static_cast<C>(h[1])) {}
    C lr, epsilon, inside;
  };

  template <class C, class Row>
  KVTABLE_RULE_FUNCTION static bool Update(Constants<C> k, Row row, C* const* columns, const C* gradient) {
    C* __restrict const w = columns[0];
    C* __restrict const a = columns[1];
    const C* __restrict const g = gradient;
    for (int64_t j = row.begin(); j < row.end(); j += row.step()) {
      a[j] += g[j] * g[j];
      w[j] -= k.lr * g[j] / (std::sqrt(a[j] + k.inside) + k.epsilon);
    }
    return false;
  }
};

}  // namespace kvtable
