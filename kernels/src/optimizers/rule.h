// What every optimizer's file provides.
//
// A rule is a struct with
//   kName, kHyperparameters (its own; all rules also have learning_rate and weight_decay), kSlots, and
//   kLearningRate where not every learning rate will do;
//   Constants<C>: made once per step from (learning rate, own hyperparameters) in double, kept as C;
//   Update(constants, dim, columns, gradient): one row. columns[0] is the value, columns[i + 1] slot i, each
//   (dim) of C = float or double. Returns whether the rule has zeroed the row for good measure (group lasso).
//
// Decoupled weight decay (w -= learning_rate * weight_decay * w) has been done before Update is called,
// unless the Constants are made from (learning rate, learning rate * weight decay, own hyperparameters): such
// a rule decays the value itself.
//
// Update must be KVTABLE_ALWAYS_INLINE: it is compiled into one function per instruction set. Sums over a row
// go through LaneSum, so that every instruction set gives the same bits.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "always_inline.h"
#include "kvtable/optimizer.h"

namespace kvtable {

using Range = Hyperparameter::Range;

// The functions below let a NaN through, as plain arithmetic does.

// -1, 0 or 1.
template <class C>
KVTABLE_ALWAYS_INLINE inline C Sign(C x) {
  return x > C{0} ? C{1} : x < C{0} ? C{-1} : x;
}

// sign(x) * max(|x| - by, 0): x moved towards zero, by >= 0.
template <class C>
KVTABLE_ALWAYS_INLINE inline C Shrink(C x, C by) {
  return std::fabs(x) <= by ? C{0} : x - std::copysign(by, x);
}

// The larger of what is kept and what is new.
template <class C>
KVTABLE_ALWAYS_INLINE inline C Larger(C kept, C fresh) {
  return fresh < kept ? kept : fresh;
}

// term(0) + ... + term(dim - 1), in an order that does not depend on the width of vectors.
template <class C, class Term>
KVTABLE_ALWAYS_INLINE inline C LaneSum(int64_t dim, const Term& term) {
  constexpr int64_t kLanes = 16;
  C lanes[kLanes] = {};
  int64_t j = 0;
  for (; j + kLanes <= dim; j += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(j + lane);
  }
  for (int64_t lane = 0; j < dim; ++j, ++lane) lanes[lane] += term(j);
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

}  // namespace kvtable
