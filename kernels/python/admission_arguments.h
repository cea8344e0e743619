// Admission policies and padding keys as Python gives them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>

#include "arguments.h"
#include "kvtable/admission.h"

namespace kvtable {

// None, or a dict with the fields that checkpoints have of a policy.
inline AdmissionPolicy AdmissionOf(nb::handle spec) {
  AdmissionPolicy policy;
  if (spec.is_none()) return policy;
  if (!nb::isinstance<nb::dict>(spec)) {
    ThrowValue("admission is " + TextOf(nb::repr(spec)) +
               "; expected a dict such as {'kind': 'count', ...}.");
  }
  using Kind = AdmissionPolicy::Kind;
  const nb::dict dict = nb::borrow<nb::dict>(spec);
  const std::string kind = dict.contains("kind") ? TextOf(dict["kind"]) : "";
  if (kind == "count" || kind == "bloom") {
    policy.kind = kind == "count" ? Kind::kCount : Kind::kBloom;
  } else if (kind == "probability") {
    policy.kind = Kind::kProbability;
  } else {
    ThrowValue("admission has kind '" + kind + "'; expected 'count', 'bloom' or 'probability'.");
  }
  for (auto [key, value] : dict) {
    const std::string name = TextOf(key);
    if (name == "kind") continue;
    if (name == "enter_threshold" && policy.kind != Kind::kProbability) {
      policy.threshold = nb::cast<uint32_t>(value);
    } else if (name == "capacity" && policy.kind == Kind::kBloom) {
      policy.capacity = nb::cast<int64_t>(value);
    } else if (name == "error" && policy.kind == Kind::kBloom) {
      policy.error = nb::cast<double>(nb::float_(value));
    } else if (name == "p" && policy.kind == Kind::kProbability) {
      policy.probability = nb::cast<double>(nb::float_(value));
    } else if (name == "below") {
      const std::string below = TextOf(value);
      if (below != "initial" && below != "zeros") {
        ThrowValue("admission has below '" + below + "'; expected 'initial' or 'zeros'.");
      }
      policy.below = below == "initial" ? Missing::kInitial : Missing::kZeros;
    } else {
      ThrowValue("admission of kind '" + kind + "' has an entry '" + name + "', which it knows nothing of.");
    }
  }
  CheckAdmission(policy);
  return policy;
}

// A key, widened; none for None.
inline std::optional<uint64_t> PaddingKeyOf(nb::handle key, KeyType type) {
  if (key.is_none()) return std::nullopt;
  const int64_t least = type == KeyType::kInt32 ? INT32_MIN : type == KeyType::kUint64 ? 0 : INT64_MIN;
  const uint64_t most = type == KeyType::kInt32    ? uint64_t{INT32_MAX}
                        : type == KeyType::kUint64 ? UINT64_MAX
                                                   : uint64_t{INT64_MAX};
  const nb::int_ number(key);
  if (number < nb::int_(least) || number > nb::int_(most)) {
    ThrowValue("padding_key is " + TextOf(nb::repr(key)) + ", which is no key of the table.");
  }
  return nb::cast<uint64_t>(number & nb::int_(UINT64_MAX));
}

}  // namespace kvtable
