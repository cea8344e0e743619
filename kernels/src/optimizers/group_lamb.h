// Group LAMB (arXiv 2107.14432's scheme): LAMB with the sparse group lasso of group_lasso.h. Its divisor is
// sqrt(v) + epsilon, uncorrected, because the divisor of a row's last update has to be computable. So epsilon
// weighs less in the first steps than in LAMB, where it is added to the corrected root.
//   r = sqrt(1 - b2^t) / (1 - b1^t);  u = r m / (sqrt(v) + epsilon);  step = lr |w| / |u| * r m
// A row of zeros has a trust ratio of 1, as in LAMB, and so comes back.
#pragma once

#include "optimizers/adam.h"
#include "optimizers/group_lasso.h"
#include "optimizers/lamb.h"

namespace kvtable {

struct GroupLamb {
  static constexpr const char* kName = "group_lamb";
  static constexpr bool kCouplesElements = true;
  static constexpr auto kHyperparameters = WithLambdas(Adam::kHyperparameters);
  static constexpr auto kSlots = WithZ(Lamb::kSlots);

  template <class C>
  struct Constants {
    Constants(double lr, double decay, const double* h)
        : lr(static_cast<C>(lr)),
          correction(static_cast<C>(std::sqrt(1 - h[4]) / (1 - h[3]))),
          rest1(static_cast<C>(1 - h[0])),
          rest2(static_cast<C>(1 - h[1])),
          epsilon(static_cast<C>(h[2])),
          lasso(lr, decay, h + Adam::kHyperparameters.size()) {}
    C lr, correction, rest1, rest2, epsilon;
    GroupLasso<C> lasso;
  };

  template <class C, class Row>
  KVTABLE_RULE_FUNCTION static bool Update(Constants<C> k, Row row, C* const* columns, const C* gradient) {
    C* __restrict const w = columns[0];
    C* __restrict const m = columns[1];
    C* __restrict const v = columns[2];
    C* __restrict const z = columns[3];
    const C* __restrict const g = gradient;
    // z takes the former v, but the trust ratio comes from all of the new one.
    const auto m_after = [=](int64_t j) KVTABLE_ALWAYS_INLINE { return m[j] + (g[j] - m[j]) * k.rest1; };
    const auto v_after = [=](int64_t j)
                             KVTABLE_ALWAYS_INLINE { return v[j] + (g[j] * g[j] - v[j]) * k.rest2; };
    const C kept = C{1} - k.lasso.decay;
    const C w_squares = LaneSum<C>(row, [=](int64_t j) KVTABLE_ALWAYS_INLINE {
      const C decayed = kept * w[j];
      return decayed * decayed;
    });
    const C u_squares = LaneSum<C>(row, [=](int64_t j) KVTABLE_ALWAYS_INLINE {
      const C u = k.correction * m_after(j) / (std::sqrt(v_after(j)) + k.epsilon);
      return u * u;
    });
    const C rate = k.lr * TrustRatio(w_squares, u_squares) * k.correction;
    for (int64_t j = row.begin(); j < row.end(); j += row.step()) {
      const C before = std::sqrt(v[j]) + k.epsilon;
      m[j] = m_after(j);
      v[j] = v_after(j);
      const C divisor = std::sqrt(v[j]) + k.epsilon;
      z[j] = k.lasso.Advance(z[j], w[j], rate * m[j], before, divisor);
    }
    return k.lasso.Solve(row, z, w,
                         [=](int64_t j) KVTABLE_ALWAYS_INLINE { return std::sqrt(v[j]) + k.epsilon; });
  }
};

}  // namespace kvtable
