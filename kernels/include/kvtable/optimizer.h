// Optimizers: what a training step does to one row.
//
// An optimizer is a rule with named hyperparameters and named slots. Table::Apply runs it over the rows of a
// batch; ApplyToArrays over the rows of plain arrays. Rules compute in the value type, 16-bit types in
// float32. A rule changes rows that have a gradient, and no others.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvtable/parallel_for.h"
#include "kvtable/types.h"

namespace kvtable {

struct Hyperparameter {
  static constexpr double kRequired = std::numeric_limits<double>::quiet_NaN();

  // The values that a hyperparameter may have; none may be infinite or NaN.
  enum class Range : uint8_t {
    kAny,          // finite
    kNonNegative,  // [0, inf)
    kNonPositive,  // (-inf, 0]
    kPositive,     // (0, inf)
    kFraction,     // [0, 1)
    kUnit,         // [0, 1]
    kFlag,         // 0 or 1
  };
  const char* name;
  double fallback;  // used where the caller gives none; kRequired: he has to
  Range range;
};

struct OptimizerSlot {
  const char* name;
  double initial;  // what the slot usually starts from; the table's SlotSpec decides
};

// The description of a rule.
struct OptimizerSpec {
  const char* name;
  std::vector<Hyperparameter> hyperparameters;  // "learning_rate" and "weight_decay" come first
  std::vector<OptimizerSlot> slots;             // each as wide as the value
  bool zeroes_rows = false;                     // has a penalty that may zero whole rows
};

// Every rule, by name.
const std::vector<OptimizerSpec>& Optimizers();

// Throws Error(kInvalidArgument), listing the names there are.
const OptimizerSpec& FindOptimizer(const std::string& name);

// A rule with the hyperparameters of one step.
struct Update {
  const OptimizerSpec* optimizer = nullptr;
  std::vector<double> hyperparameters;  // in the order of the specification
  bool stochastic_rounding = false;     // of 16-bit columns; a pure function of (seed, key, column)
  uint64_t seed = 0;                    // give each step another
  bool float32_gradients = false;       // of 16-bit columns: their gradients are not of 16 bits
  bool skip_nonfinite = false;          // leave a row alone whose summed gradient has a NaN or an infinity
};

// What values of this range are, for people: "0 or more".
const char* Describe(Hyperparameter::Range range);

// An update by names, in any order; hyperparameters that are not given have their fallback. Throws
// Error(kInvalidArgument) that names the optimizer or hyperparameter that there is not, or that is missing.
Update MakeUpdate(const std::string& optimizer,
                  const std::vector<std::pair<std::string, double>>& hyperparameters);

// Throws Error(kInvalidArgument) that names the hyperparameter which is out of range.
void CheckUpdate(const Update& update);

struct ApplyCounts {
  int64_t updated = 0;  // rows
  int64_t skipped = 0;  // rows with a gradient that is not finite, where Update::skip_nonfinite
};

// Throws Error(kInvalidArgument) unless there is an array for the value and for each of the rule's slots.
void CheckColumns(const Update& update, size_t columns);

// Updates row rows[i] of arrays by gradient row i; row i where `rows` is null. Rows differ from each other.
ApplyCounts ApplyToArrays(const Update& update, ValueType value_type, int64_t dim,
                          const std::vector<void*>& columns /* value, then slots: (>= max row, dim) */,
                          const int64_t* rows /* (n) or null */, int64_t n,
                          const void* gradients /* (n, dim) */, ParallelFor& threads);

}  // namespace kvtable
