// Which keys get a row and which rows go: the attribute `policies` of KvTableHandle, and that of kvmeta.
//
// One JSON object; each policy has a key of its own, and what is not there is not wanted:
//   "admission": {"kind": "count", "enter_threshold": 3, "below": "initial"},
//                {"kind": "bloom", "enter_threshold": 3, "capacity": 1000000, "error": 0.01, "below": "initial"} or
//                {"kind": "probability", "p": 0.1, "below": "zeros"};
//                with "on": "update" where updates count, and not lookups
//   "padding_key": 0
//   "expiry": [{"policy": "after_steps", "steps": 1000}, {"policy": "after_seconds", "seconds": 86400},
//              {"policy": "below_norm", "norm": 0.01}, {"policy": "below_frequency", "frequency": 3},
//              {"policy": "keep_top", "rows": 1000000, "by": "frequency"}], any of them
//   "expire_every": 1000, "expire_on_save": true
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "json.h"
#include "kvtable/admission.h"
#include "kvtable/expiry.h"

namespace kvtools {

// Throws as TablePolicies::Parse, and kvtable::Error.
kvtable::EvictPolicy EvictPolicyFromJson(const Json& object);

// Throws as TablePolicies::Parse, and kvtable::Error.
kvtable::AdmissionPolicy AdmissionFromJson(const Json& object);

struct TablePolicies {
  // Throws std::invalid_argument naming what is missing, of another type, or out of range. An empty text has
  // none.
  static TablePolicies Parse(const std::string& json);

  // What stands between the braces of `json`.
  std::string Fields() const;

  std::string json;
  kvtable::AdmissionPolicy admission;
  std::optional<uint64_t> padding_key;  // as the table's keys are when widened
  std::vector<kvtable::EvictPolicy> expiry;
  int64_t expire_every = 0;  // updates; 0: never beside training
  bool expire_on_save = false;
};

}  // namespace kvtools
