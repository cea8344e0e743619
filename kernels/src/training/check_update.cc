// Which hyperparameters an optimizer takes.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "kvtable/optimizer.h"

namespace kvtable {

namespace {

using Range = Hyperparameter::Range;

bool InRange(double x, Range range) {
  if (!std::isfinite(x)) return false;
  switch (range) {
    case Range::kAny:
      return true;
    case Range::kNonNegative:
      return x >= 0;
    case Range::kNonPositive:
      return x <= 0;
    case Range::kPositive:
      return x > 0;
    case Range::kFraction:
      return x >= 0 && x < 1;
    case Range::kUnit:
      return x >= 0 && x <= 1;
    case Range::kFlag:
      return x == 0 || x == 1;
  }
  return false;
}

// As short as reads back the same.
std::string TextOf(double x) {
  for (int digits : {6, 17}) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.*g", digits, x);
    if (digits == 17 || std::strtod(text, nullptr) == x) return text;
  }
  return "";
}

}  // namespace

const char* Describe(Range range) {
  switch (range) {
    case Range::kAny:
      return "a finite number";
    case Range::kNonNegative:
      return "0 or more";
    case Range::kNonPositive:
      return "0 or less";
    case Range::kPositive:
      return "more than 0";
    case Range::kFraction:
      return "at least 0 and less than 1";
    case Range::kUnit:
      return "0 to 1";
    case Range::kFlag:
      return "0 or 1";
  }
  return "";
}

void CheckColumns(const Update& update, size_t columns) {
  if (columns == 1 + update.optimizer->slots.size()) return;
  throw Error(ErrorCode::kInvalidArgument, std::string("Optimizer ") + update.optimizer->name + " keeps " +
                                               std::to_string(update.optimizer->slots.size()) +
                                               " slots; got " +
                                               std::to_string(static_cast<int64_t>(columns) - 1) + ".");
}

void CheckUpdate(const Update& update) {
  const OptimizerSpec& spec = *update.optimizer;
  if (update.hyperparameters.size() != spec.hyperparameters.size()) {
    throw Error(ErrorCode::kInvalidArgument, std::string("Optimizer ") + spec.name + " got " +
                                                 std::to_string(update.hyperparameters.size()) +
                                                 " hyperparameters; expected " +
                                                 std::to_string(spec.hyperparameters.size()) + ".");
  }
  for (size_t i = 0; i < spec.hyperparameters.size(); ++i) {
    const Hyperparameter& h = spec.hyperparameters[i];
    if (InRange(update.hyperparameters[i], h.range)) continue;
    throw Error(ErrorCode::kInvalidArgument, std::string("Optimizer ") + spec.name + " got " + h.name +
                                                 " = " + TextOf(update.hyperparameters[i]) + "; expected " +
                                                 Describe(h.range) + ".");
  }
}

}  // namespace kvtable
