// Group AdaBelief: AdaBelief with the sparse group lasso of group_lasso.h. Its divisor is sqrt(s) + epsilon,
// uncorrected, because the divisor of a row's last update has to be computable. So epsilon weighs less in the
// first steps than in AdaBelief, where it is added to the corrected root:
//   step = lr sqrt(1 - b2^t) / (1 - b1^t) * m
#pragma once

#include "optimizers/adabelief.h"
#include "optimizers/group_lasso.h"

namespace kvtable {

struct GroupAdaBelief {
  static constexpr const char* kName = "group_adabelief";
  static constexpr bool kCouplesElements = true;
  static constexpr auto kHyperparameters = WithLambdas(AdaBelief::kHyperparameters);
  static constexpr auto kSlots = WithZ(AdaBelief::kSlots);

  template <class C>
  struct Constants {
    Constants(double lr, double decay, const double* h)
        : plain(lr, h),
          alpha(static_cast<C>(lr * std::sqrt(1 - h[4]) / (1 - h[3]))),
          lasso(lr, decay, h + AdaBelief::kHyperparameters.size()) {}
    AdaBelief::Constants<C> plain;
    C alpha;
    GroupLasso<C> lasso;
  };

  template <class C, class Row>
  KVTABLE_RULE_FUNCTION static bool Update(Constants<C> k, Row row, C* const* columns, const C* gradient) {
    C* __restrict const w = columns[0];
    C* __restrict const m = columns[1];
    C* __restrict const s = columns[2];
    C* __restrict const z = columns[3];
    const C* __restrict const g = gradient;
    for (int64_t j = row.begin(); j < row.end(); j += row.step()) {
      const C before = std::sqrt(s[j]) + k.plain.epsilon;
      m[j] += (g[j] - m[j]) * k.plain.rest1;
      const C surprise = g[j] - m[j];
      s[j] = k.plain.beta2 * s[j] + k.plain.rest2 * (surprise * surprise) + k.plain.epsilon;
      const C divisor = std::sqrt(s[j]) + k.plain.epsilon;
      z[j] = k.lasso.Advance(z[j], w[j], k.alpha * m[j], before, divisor);
    }
    return k.lasso.Solve(row, z, w,
                         [=](int64_t j) KVTABLE_ALWAYS_INLINE { return std::sqrt(s[j]) + k.plain.epsilon; });
  }
};

}  // namespace kvtable
