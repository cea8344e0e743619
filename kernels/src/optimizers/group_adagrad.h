// Group Adagrad (arXiv 2107.14432): Adagrad with the sparse group lasso of group_lasso.h.
#pragma once

#include "optimizers/adagrad.h"
#include "optimizers/group_lasso.h"

namespace kvtable {

struct GroupAdagrad {
  static constexpr const char* kName = "group_adagrad";
  static constexpr bool kCouplesElements = true;
  static constexpr auto kHyperparameters = WithLambdas(Adagrad::kHyperparameters);
  static constexpr auto kSlots = WithZ(Adagrad::kSlots);

  template <class C>
  struct Constants {
    Constants(double lr, double decay, const double* h)
        : plain(lr, h), lasso(lr, decay, h + Adagrad::kHyperparameters.size()) {}
    Adagrad::Constants<C> plain;
    GroupLasso<C> lasso;
  };

  template <class C, class Row>
  KVTABLE_RULE_FUNCTION static bool Update(Constants<C> k, Row row, C* const* columns, const C* gradient) {
    C* __restrict const w = columns[0];
    C* __restrict const a = columns[1];
    C* __restrict const z = columns[2];
    const C* __restrict const g = gradient;
    for (int64_t j = row.begin(); j < row.end(); j += row.step()) {
      const C before = std::sqrt(a[j] + k.plain.inside) + k.plain.epsilon;
      a[j] += g[j] * g[j];
      const C divisor = std::sqrt(a[j] + k.plain.inside) + k.plain.epsilon;
      z[j] = k.lasso.Advance(z[j], w[j], k.plain.lr * g[j], before, divisor);
    }
    return k.lasso.Solve(row, z, w, [=](int64_t j) KVTABLE_ALWAYS_INLINE {
      return std::sqrt(a[j] + k.plain.inside) + k.plain.epsilon;
    });
  }
};

}  // namespace kvtable
