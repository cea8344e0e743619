// Group Adam (arXiv 2107.14432): Adam with the sparse group lasso of group_lasso.h.
#pragma once

#include "optimizers/adam.h"
#include "optimizers/group_lasso.h"

namespace kvtable {

struct GroupAdam {
  static constexpr const char* kName = "group_adam";
  static constexpr bool kCouplesElements = true;
  static constexpr auto kHyperparameters = WithLambdas(Adam::kHyperparameters);
  static constexpr auto kSlots = WithZ(Adam::kSlots);

  template <class C>
  struct Constants {
    Constants(double lr, double decay, const double* h)
        : plain(lr, h), lasso(lr, decay, h + Adam::kHyperparameters.size()) {}
    Adam::Constants<C> plain;
    GroupLasso<C> lasso;
  };

  template <class C, class Row>
  KVTABLE_RULE_FUNCTION static bool Update(Constants<C> k, Row row, C* const* columns, const C* gradient) {
    C* __restrict const w = columns[0];
    C* __restrict const m = columns[1];
    C* __restrict const v = columns[2];
    C* __restrict const z = columns[3];
    const C* __restrict const g = gradient;
    for (int64_t j = row.begin(); j < row.end(); j += row.step()) {
      const C before = std::sqrt(v[j]) + k.plain.epsilon;
      m[j] += (g[j] - m[j]) * k.plain.rest1;
      v[j] += (g[j] * g[j] - v[j]) * k.plain.rest2;
      const C divisor = std::sqrt(v[j]) + k.plain.epsilon;
      z[j] = k.lasso.Advance(z[j], w[j], k.plain.alpha * m[j], before, divisor);
    }
    return k.lasso.Solve(row, z, w,
                         [=](int64_t j) KVTABLE_ALWAYS_INLINE { return std::sqrt(v[j]) + k.plain.epsilon; });
  }
};

}  // namespace kvtable
