// Group Momentum (arXiv 2107.14432): momentum with the sparse group lasso of group_lasso.h. The divisor is 1.
#pragma once

#include "optimizers/group_lasso.h"
#include "optimizers/momentum.h"

namespace kvtable {

struct GroupMomentum {
  static constexpr const char* kName = "group_momentum";
  static constexpr bool kCouplesElements = true;
  static constexpr auto kHyperparameters = WithLambdas(Momentum::kHyperparameters);
  static constexpr auto kSlots = WithZ(Momentum::kSlots);

  template <class C>
  struct Constants {
    Constants(double lr, double decay, const double* h)
        : plain(lr, h), lasso(lr, decay, h + Momentum::kHyperparameters.size()) {}
    Momentum::Constants<C> plain;
    GroupLasso<C> lasso;
  };

  template <class C, class Row>
  KVTABLE_RULE_FUNCTION static bool Update(Constants<C> k, Row row, C* const* columns, const C* gradient) {
    C* __restrict const w = columns[0];
    C* __restrict const a = columns[1];
    C* __restrict const z = columns[2];
    const C* __restrict const g = gradient;
    for (int64_t j = row.begin(); j < row.end(); j += row.step()) {
      a[j] = k.plain.momentum * a[j] + g[j];
      const C step = k.plain.from_gradient * g[j] + k.plain.from_accumulator * a[j];
      z[j] = k.lasso.Advance(z[j], w[j], step, C{1}, C{1});
    }
    return k.lasso.Solve(row, z, w, [](int64_t) KVTABLE_ALWAYS_INLINE { return C{1}; });
  }
};

}  // namespace kvtable
