// FTRL-proximal (McMahan et al., KDD 2013) as TensorFlow and Keras do it, with p = -learning_rate_power:
//   n' = n + g^2;  z += g + 2 l2_shrinkage w - (n'^p - n^p) / lr * w
//   w = (clip(z, -l1, l1) - z) / ((n'^p + beta) / lr + 2 l2)
// The value is a function of the slots alone: what it started from has little weight after the first update.
//
// group_ftrl has the lasso over rows as well (group_lasso.h), with its lambdas as they are:
//   s = clip(z, -l1, l1) - z;  |s| > l21 sqrt(dim): w as above, times 1 - l21 sqrt(dim) / |s|, otherwise w =
//   0
#pragma once

#include "optimizers/group_lasso.h"
#include "optimizers/rule.h"

namespace kvtable {

template <bool kGroup>
struct FtrlRule {
  static constexpr bool kCouplesElements = kGroup;
  static constexpr Range kLearningRate = Range::kPositive;  // it is divided by
  static constexpr std::array<OptimizerSlot, 2> kSlots = {{{"accumulator", 0.1}, {"linear", 0.0}}};

  template <class C>
  struct Constants {
    Constants(double lr, const double* h)
        : power(static_cast<C>(-h[0])),
          inverse(static_cast<C>(1 / lr)),
          twice_shrinkage(static_cast<C>(2 * h[1])),
          beta(static_cast<C>(h[2] / lr)),
          l1(static_cast<C>(h[3])),
          twice_l2(static_cast<C>(2 * h[4])),
          l21(kGroup ? static_cast<C>(h[5]) : C{0}) {}
    C power, inverse, twice_shrinkage, beta, l1, twice_l2, l21;
  };

  template <class C, class Row>
  KVTABLE_RULE_FUNCTION static bool Update(Constants<C> k, Row row, C* const* columns, const C* gradient) {
    if (k.power == C{0.5}) {
      return Run(k, row, columns, gradient, [](C n) KVTABLE_ALWAYS_INLINE { return std::sqrt(n); });
    }
    return Run(k, row, columns, gradient, [=](C n) KVTABLE_ALWAYS_INLINE { return std::pow(n, k.power); });
  }

 private:
  template <class C, class Row, class Root>
  KVTABLE_RULE_FUNCTION static bool Run(Constants<C> k, Row row, C* const* columns, const C* gradient,
                                        const Root& root) {
    C* __restrict const w = columns[0];
    C* __restrict const n = columns[1];
    C* __restrict const z = columns[2];
    const C* __restrict const g = gradient;
    for (int64_t j = row.begin(); j < row.end(); j += row.step()) {
      const C before = root(n[j]);
      n[j] += g[j] * g[j];
      const C after = root(n[j]);
      z[j] += g[j] + k.twice_shrinkage * w[j] - (after - before) * k.inverse * w[j];
      if constexpr (!kGroup) w[j] = -Shrink(z[j], k.l1) / (after * k.inverse + k.beta + k.twice_l2);
    }
    if constexpr (kGroup) {
      return SolveGroupLasso(row, z, w, k.l1, k.twice_l2, k.l21, [=](int64_t j) KVTABLE_ALWAYS_INLINE {
        return root(n[j]) * k.inverse + k.beta;
      });
    }
    return false;
  }
};

struct Ftrl : FtrlRule<false> {
  static constexpr const char* kName = "ftrl";
  static constexpr std::array<Hyperparameter, 5> kHyperparameters = {{
      {"learning_rate_power", -0.5, Range::kNonPositive},
      {"l2_shrinkage", 0.0, Range::kNonNegative},
      {"beta", 0.0, Range::kNonNegative},
      {"l1", 0.0, Range::kNonNegative},
      {"l2", 0.0, Range::kNonNegative},
  }};
};

struct GroupFtrl : FtrlRule<true> {
  static constexpr const char* kName = "group_ftrl";
  static constexpr std::array<Hyperparameter, 6> kHyperparameters = {{
      {"learning_rate_power", -0.5, Range::kNonPositive},
      {"l2_shrinkage", 0.0, Range::kNonNegative},
      {"beta", 0.0, Range::kNonNegative},
      {"l1", 0.0, Range::kNonNegative},
      {"l2", 0.0, Range::kNonNegative},
      {"l21", 0.0, Range::kNonNegative},
  }};
};

}  // namespace kvtable
