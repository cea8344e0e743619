// w -= lr * g
#pragma once

#include "optimizers/rule.h"

namespace kvtable {

struct Sgd {
  static constexpr const char* kName = "sgd";
  static constexpr std::array<Hyperparameter, 0> kHyperparameters = {};
  static constexpr std::array<OptimizerSlot, 0> kSlots = {};

  template <class C>
  struct Constants {
    Constants(double learning_rate, const double*) : lr(static_cast<C>(learning_rate)) {}
    C lr;
  };

  template <class C>
  KVTABLE_ALWAYS_INLINE static bool Update(Constants<C> k, int64_t dim, C* const* columns,
                                           const C* gradient) {
    C* __restrict const w = columns[0];
    const C* __restrict const g = gradient;
    for (int64_t j = 0; j < dim; ++j) w[j] -= k.lr * g[j];
    return false;
  }
};

}  // namespace kvtable
