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

  template <class C, class Row>
  KVTABLE_RULE_FUNCTION static bool Update(Constants<C> k, Row row, C* const* columns, const C* gradient) {
    C* __restrict const w = columns[0];
    const C* __restrict const g = gradient;
    for (int64_t j = row.begin(); j < row.end(); j += row.step()) w[j] -= k.lr * g[j];
    return false;
  }
};

}  // namespace kvtable
