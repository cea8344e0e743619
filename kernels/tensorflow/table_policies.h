// Which keys get a row and which rows go: the attribute `policies` of KvTableHandle, and that of kvmeta.
//
// One JSON object; each policy has a key of its own, and what is not there is not wanted:
//   "admission": {"kind": "count", "enter_threshold": 3, "below": "initial"},
//                {"kind": "bloom", "enter_threshold": 3, "capacity": 1000000, "error": 0.01, "below": "initial"} or
//                {"kind": "probability", "p": 0.1, "below": "zeros"};
//                with "on": "update" where updates count, and not lookups
//   "padding_key": 0
#pragma once

#include <optional>
#include <string>

#include "json.h"
#include "kvtable/admission.h"

namespace kvtools {

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
};

}  // namespace kvtools
