// Sparse group lasso for optimizers whose step divides by something (Yue et al., arXiv 2107.14432): a row is
// the group, and one that does not earn its keep becomes zero as a whole.
//
// A plain rule does w -= step / D, with D its divisor for each element: sqrt(v) + epsilon for Adam, 1 for
// momentum. Its group form keeps z beside it, the point from which the proximal problem gives w:
//   z += step - (D - D_before) w
//   s = clip(z, -l1, l1) - z
//   |s| > l21 sqrt(dim): w = s (1 - l21 sqrt(dim) / |s|) / (D + 2 l2), otherwise w = 0
// in which D_before is the divisor of the row's last update, computed from its slots before they change. (So
// D may not depend on the number of the step: corrections of the second moment are part of the step here.)
// Without lambdas z = -D w, and what remains is the plain rule. z goes on while w is zero, so a row comes
// back once its gradients ask for it. The lambdas are l1, l2 and l21 times the learning rate, but for
// group_ftrl.
//
// An element that was never updated has no D_before: it counts as zero, so that w takes part with its whole
// weight. z == 0 tells such an element: after an update it implies w == 0, and D_before only ever multiplies
// w. That holds for rows that were restored, and for trained values that were given new slots as well; and
// where z has vanished in 16 bits beside a small w, starting over from w is what is wanted.
//
// Weight decay is a step of D decay w, made along with the rule's: it would be undone if w alone decayed.
#pragma once

#include "optimizers/rule.h"

namespace kvtable {

// A plain rule's hyperparameters and the lambdas.
template <size_t N>
constexpr std::array<Hyperparameter, N + 3> WithLambdas(const std::array<Hyperparameter, N>& plain) {
  std::array<Hyperparameter, N + 3> all{};
  for (size_t i = 0; i < N; ++i) all[i] = plain[i];
  all[N] = {"l1", 0.0, Range::kNonNegative};
  all[N + 1] = {"l2", 0.0, Range::kNonNegative};
  all[N + 2] = {"l21", 0.0, Range::kNonNegative};
  return all;
}

// A plain rule's slots and z.
template <size_t N>
constexpr std::array<OptimizerSlot, N + 1> WithZ(const std::array<OptimizerSlot, N>& plain) {
  std::array<OptimizerSlot, N + 1> all{};
  for (size_t i = 0; i < N; ++i) all[i] = plain[i];
  all[N] = {"z", 0.0};
  return all;
}

// Makes w from z. Returns whether the row is zero.
template <class C, class Row, class Divisor>
KVTABLE_RULE_FUNCTION inline bool SolveGroupLasso(Row row, const C* __restrict z, C* __restrict w, C l1,
                                                  C twice_l2, C l21, const Divisor& divisor) {
  const auto shrunk = [=](int64_t j) KVTABLE_ALWAYS_INLINE { return Shrink(z[j], l1); };  // -s
  const C threshold = l21 * std::sqrt(static_cast<C>(row.dim));
  C scale = -1;
  bool zero;
  if (threshold > C{0}) {
    const C squares = LaneSum<C>(row, [=](int64_t j) KVTABLE_ALWAYS_INLINE { return shrunk(j) * shrunk(j); });
    const C norm = std::sqrt(squares);
    zero = norm <= threshold;
    scale = threshold / norm - C{1};
  } else {  // no squares: those of small numbers vanish
    zero = LaneSum<C>(row, [=](int64_t j) KVTABLE_ALWAYS_INLINE { return std::fabs(shrunk(j)); }) == C{0};
  }
  if (zero) {
    for (int64_t j = row.begin(); j < row.end(); j += row.step()) w[j] = C{0};
  } else {
    for (int64_t j = row.begin(); j < row.end(); j += row.step())
      w[j] = scale * shrunk(j) / (divisor(j) + twice_l2);
  }
  return zero;
}

// What a group rule's constants hold beside the plain rule's.
template <class C>
struct GroupLasso {
  // `lambdas`: l1, l2, l21
  GroupLasso(double lr, double decay, const double* lambdas)
      : decay(static_cast<C>(decay)),
        l1(static_cast<C>(lr * lambdas[0])),
        twice_l2(static_cast<C>(2 * lr * lambdas[1])),
        l21(static_cast<C>(lr * lambdas[2])) {}

  // z after a step.
  KVTABLE_RULE_FUNCTION C Advance(C z, C w, C step, C before, C divisor) const {
    return z + (step - (divisor - (z == C{0} ? C{0} : before) - decay * divisor) * w);
  }

  template <class Row, class Divisor>
  KVTABLE_RULE_FUNCTION bool Solve(Row row, const C* z, C* w, const Divisor& divisor) const {
    return SolveGroupLasso(row, z, w, l1, twice_l2, l21, divisor);
  }

  C decay, l1, twice_l2, l21;
};

}  // namespace kvtable
