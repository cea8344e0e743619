// RMSprop (Tieleman and Hinton, 2012), four rules: with or without momentum, centered or not.
//   ms = rho ms + (1 - rho) g^2;  centered: mg = rho mg + (1 - rho) g, otherwise mg = 0
//   d = lr g / (sqrt(ms - mg^2 + epsilon_inside) + epsilon)
//   mom = momentum mom + d, w -= mom;  without momentum: w -= d
// TensorFlow's ops and Keras have epsilon inside of the root; tf_keras's legacy optimizer, where it has no
// momentum, outside.
#pragma once

#include "optimizers/rule.h"

namespace kvtable {

template <bool kMomentum, bool kCentered>
struct RmsPropRule {
  template <class C>
  struct Constants {
    Constants(double lr, const double* h)
        : lr(static_cast<C>(lr)),
          rest(static_cast<C>(1 - h[0])),
          epsilon(static_cast<C>(h[1])),
          inside(static_cast<C>(h[2])),
          momentum(kMomentum ? static_cast<C>(h[3]) : C{0}) {}
    C lr, rest, epsilon, inside, momentum;
  };

  template <class C, class Row>
  KVTABLE_RULE_FUNCTION static bool Update(Constants<C> k, Row row, C* const* columns, const C* gradient) {
    C* __restrict const w = columns[0];
    C* __restrict const ms = columns[1];
    C* __restrict const mom = kMomentum ? columns[2] : nullptr;
    C* __restrict const mg = kCentered ? columns[kMomentum ? 3 : 2] : nullptr;
    const C* __restrict const g = gradient;
    for (int64_t j = row.begin(); j < row.end(); j += row.step()) {
      ms[j] += (g[j] * g[j] - ms[j]) * k.rest;
      C square = ms[j];
      if constexpr (kCentered) {
        mg[j] += (g[j] - mg[j]) * k.rest;
        square -= mg[j] * mg[j];
      }
      C step = k.lr * g[j] / (std::sqrt(square + k.inside) + k.epsilon);
      if constexpr (kMomentum) {
        mom[j] = k.momentum * mom[j] + step;
        step = mom[j];
      }
      w[j] -= step;
    }
    return false;
  }

 protected:
  static constexpr Hyperparameter kRho = {"rho", 0.9, Range::kUnit};
  static constexpr Hyperparameter kEpsilon = {"epsilon", 0.0, Range::kNonNegative};
  static constexpr Hyperparameter kInside = {"epsilon_inside", 1e-7, Range::kNonNegative};
};

struct RmsProp : RmsPropRule<true, false> {
  static constexpr const char* kName = "rmsprop";
  static constexpr std::array<Hyperparameter, 4> kHyperparameters = {
      {kRho, kEpsilon, kInside, {"momentum", 0.0, Range::kUnit}}};
  static constexpr std::array<OptimizerSlot, 2> kSlots = {{{"rms", 0.0}, {"momentum", 0.0}}};
};

struct RmsPropPlain : RmsPropRule<false, false> {
  static constexpr const char* kName = "rmsprop_plain";
  static constexpr std::array<Hyperparameter, 3> kHyperparameters = {{kRho, kEpsilon, kInside}};
  static constexpr std::array<OptimizerSlot, 1> kSlots = {{{"rms", 0.0}}};
};

struct CenteredRmsProp : RmsPropRule<true, true> {
  static constexpr const char* kName = "centered_rmsprop";
  static constexpr std::array<Hyperparameter, 4> kHyperparameters = RmsProp::kHyperparameters;
  static constexpr std::array<OptimizerSlot, 3> kSlots = {{{"rms", 0.0}, {"momentum", 0.0}, {"mg", 0.0}}};
};

struct CenteredRmsPropPlain : RmsPropRule<false, true> {
  static constexpr const char* kName = "centered_rmsprop_plain";
  static constexpr std::array<Hyperparameter, 3> kHyperparameters = RmsPropPlain::kHyperparameters;
  static constexpr std::array<OptimizerSlot, 2> kSlots = {{{"rms", 0.0}, {"mg", 0.0}}};
};

}  // namespace kvtable
