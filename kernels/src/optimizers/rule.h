// What every optimizer's file provides.
//
// A rule is a struct with
//   kName, kHyperparameters (its own; all rules also have learning_rate and weight_decay), kSlots, and
//   kLearningRate where not every learning rate will do;
//   Constants<C>: made once per step from (learning rate, own hyperparameters) in double, kept as C;
//   Update(constants, row, columns, gradient): one row. columns[0] is the value, columns[i + 1] slot i, each
//   (dim) of C = float or double. Returns whether the rule has zeroed the row for good measure (group lasso);
//   kCouplesElements = true where an element's update depends on the row's other elements.
//
// Decoupled weight decay (w -= learning_rate * weight_decay * w) has been done before Update is called,
// unless the Constants are made from (learning rate, learning rate * weight decay, own hyperparameters): such
// a rule decays the value itself.
//
// The same Update runs on a CPU, where one thread has the whole row, and on a GPU, where 16 lanes share it.
// So it does not count to dim: it does the elements that `row` gives it, which are all of them (WholeRow,
// below: after inlining, the plain loop from 0 to dim) or a lane's own (cuda/row_lanes.h). In between,
// elements meet in LaneSum only, which adds in an order that is made for 16 lanes: so every instruction set
// and the GPU give the same bits. A parameter for the loop was preferred to views in place of the pointers,
// because it leaves the arithmetic as it is and what compilers know about the pointers.
//
// Update must be a KVTABLE_RULE_FUNCTION: it is inlined into one function per instruction set.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "base/always_inline.h"
#include "base/host_device.h"
#include "kvtable/optimizer.h"

#define KVTABLE_RULE_FUNCTION KVTABLE_HOST_DEVICE KVTABLE_ALWAYS_INLINE

namespace kvtable {

using Range = Hyperparameter::Range;

// Rules that are compiled together.
template <class... Rules>
struct RuleList {};

// Whether the rule decays weights itself.
template <class Rule, class C>
inline constexpr bool kDecaysItself =
    std::is_constructible_v<typename Rule::template Constants<C>, double, double, const double*>;

template <class Rule, class C>
typename Rule::template Constants<C> MakeConstants(const Update& update) {
  const double learning_rate = update.hyperparameters[0];
  const double* const own = update.hyperparameters.data() + 2;
  if constexpr (kDecaysItself<Rule, C>) {
    return {learning_rate, learning_rate * update.hyperparameters[1], own};
  } else {
    return {learning_rate, own};
  }
}

template <class Rule, class = void>
inline constexpr bool kCouplesElements = false;
template <class Rule>
inline constexpr bool kCouplesElements<Rule, std::void_t<decltype(Rule::kCouplesElements)>> =
    Rule::kCouplesElements;

// The functions below let a NaN through, as plain arithmetic does.

// -1, 0 or 1.
template <class C>
KVTABLE_RULE_FUNCTION inline C Sign(C x) {
  return x > C{0} ? C{1} : x < C{0} ? C{-1} : x;
}

// sign(x) * max(|x| - by, 0): x moved towards zero, by >= 0.
template <class C>
KVTABLE_RULE_FUNCTION inline C Shrink(C x, C by) {
  return std::fabs(x) <= by ? C{0} : x - std::copysign(by, x);
}

// The larger of what is kept and what is new.
template <class C>
KVTABLE_RULE_FUNCTION inline C Larger(C kept, C fresh) {
  return fresh < kept ? kept : fresh;
}

// The elements of a row for a thread that does them all.
struct WholeRow {
  int64_t dim;

  KVTABLE_RULE_FUNCTION static constexpr int64_t begin() { return 0; }
  KVTABLE_RULE_FUNCTION int64_t end() const { return dim; }
  KVTABLE_RULE_FUNCTION static constexpr int64_t step() { return 1; }
};

// term(0) + ... + term(dim - 1), in an order that does not depend on the width of vectors. A row that lanes
// share has its own LaneSum.
template <class C, class Term>
KVTABLE_RULE_FUNCTION inline C LaneSum(WholeRow row, const Term& term) {
  constexpr int64_t kLanes = 16;
  C lanes[kLanes] = {};
  const int64_t dim = row.dim;
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
