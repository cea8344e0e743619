// Ages, policies and clocks as Python gives them.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <vector>

#include "arguments.h"
#include "kvtable/expiry.h"

namespace kvtable {

inline AgeUnit AgeUnitOf(const std::string& name) {
  if (name == "seconds") return AgeUnit::kSeconds;
  if (name == "steps") return AgeUnit::kSteps;
  ThrowValue("age_unit is '" + name + "'; expected 'seconds' or 'steps'.");
}

inline RankBy RankByOf(const std::string& name) {
  if (name == "frequency") return RankBy::kFrequency;
  if (name == "version") return RankBy::kVersion;
  if (name == "norm") return RankBy::kNorm;
  ThrowValue("by is '" + name + "'; expected 'frequency', 'version' or 'norm'.");
}

inline EvictPolicy PolicyOf(const std::string& kind, nb::handle number, const std::string& by) {
  EvictPolicy policy;
  policy.by = RankByOf(by);
  using Kind = EvictPolicy::Kind;
  if (kind == "below_norm") {
    policy.kind = Kind::kBelowNorm;
    policy.norm = nb::cast<double>(number);
    return policy;
  }
  policy.kind = kind == "after_steps"       ? Kind::kAfterSteps
                : kind == "after_seconds"   ? Kind::kAfterSeconds
                : kind == "below_frequency" ? Kind::kBelowFrequency
                : kind == "keep_top"        ? Kind::kKeepTop
                                            : Kind::kBelowNorm;
  if (policy.kind == Kind::kBelowNorm) {
    ThrowValue("The policy is '" + kind +
               "'; expected 'after_steps', 'after_seconds', 'below_norm', 'below_frequency' or 'keep_top'.");
  }
  policy.count = nb::cast<int64_t>(number);
  return policy;
}

// Of tuples (policy, number) and (policy, number, by).
inline std::vector<EvictPolicy> PoliciesOf(nb::handle tuples) {
  std::vector<EvictPolicy> policies;
  for (nb::handle tuple : tuples) {
    policies.push_back(
        PolicyOf(TextOf(tuple[0]), tuple[1], nb::len(tuple) > 2 ? TextOf(tuple[2]) : "frequency"));
  }
  return policies;
}

// A clock that its owner sets: None, or an array of uint64 (1,), in which the microseconds since 1970 stand.
inline EvictionClock ClockOf(nb::handle array) {
  if (array.is_none()) return nullptr;
  // The view holds the array. It goes with the table, and so under the GIL.
  const auto view = std::make_shared<ArrayView>("clock", array, DtypeNamed("uint64"), true);
  view->ExpectShape("clock", {1});
  return [view] { return __atomic_load_n(static_cast<const uint64_t*>(view->data()), __ATOMIC_RELAXED); };
}

inline Expiry ExpiryOf(int64_t max_age, const std::string& unit, nb::handle clock) {
  Expiry expiry;
  expiry.unit = AgeUnitOf(unit);
  if (max_age < 0 || max_age > int64_t{UINT32_MAX}) {
    ThrowValue("max_age is " + std::to_string(max_age) +
               "; expected 1 to 4294967295, or 0 for rows that do not age.");
  }
  expiry.max_age = static_cast<uint32_t>(max_age);
  expiry.clock = ClockOf(clock);
  return expiry;
}

}  // namespace kvtable
