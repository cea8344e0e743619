#include "table_policies.h"

#include <stdexcept>

namespace kvtools {

kvtable::AdmissionPolicy AdmissionFromJson(const Json& object) {
  using Kind = kvtable::AdmissionPolicy::Kind;
  kvtable::AdmissionPolicy admission;
  const std::string& kind = object.String("kind");
  if (kind == "probability") {
    admission.kind = Kind::kProbability;
    admission.probability = object.Double("p", 0.0);
  } else if (kind == "count" || kind == "bloom") {
    admission.kind = kind == "count" ? Kind::kCount : Kind::kBloom;
    const uint64_t threshold = object.Uint("enter_threshold");
    if (threshold > UINT32_MAX)
      throw std::invalid_argument("enter_threshold is " + std::to_string(threshold));
    admission.threshold = static_cast<uint32_t>(threshold);
  } else {
    throw std::invalid_argument("unknown admission '" + kind + "'");
  }
  if (kind == "bloom") {
    admission.capacity = object.Int("capacity");
    admission.error = object.Double("error", 0.0);
  }
  const std::string below = object.Has("below") ? object.String("below") : "initial";
  if (below != "initial" && below != "zeros") throw std::invalid_argument("unknown below '" + below + "'");
  admission.below = below == "initial" ? kvtable::Missing::kInitial : kvtable::Missing::kZeros;
  const std::string on = object.Has("on") ? object.String("on") : "lookup";
  if (on != "lookup" && on != "update") throw std::invalid_argument("unknown on '" + on + "'");
  admission.on_update = on == "update";
  kvtable::CheckAdmission(admission);
  return admission;
}

kvtable::EvictPolicy EvictPolicyFromJson(const Json& object) {
  using Kind = kvtable::EvictPolicy::Kind;
  kvtable::EvictPolicy policy;
  const std::string& name = object.String("policy");
  if (name == "after_steps") {
    policy.kind = Kind::kAfterSteps;
    policy.count = object.Int("steps");
  } else if (name == "after_seconds") {
    policy.kind = Kind::kAfterSeconds;
    policy.count = object.Int("seconds");
  } else if (name == "below_norm") {
    policy.kind = Kind::kBelowNorm;
    policy.norm = object.Double("norm", 0.0);
  } else if (name == "below_frequency") {
    policy.kind = Kind::kBelowFrequency;
    policy.count = object.Int("frequency");
  } else if (name == "keep_top") {
    policy.kind = Kind::kKeepTop;
    policy.count = object.Int("rows");
    const std::string& by = object.String("by");
    if (by != "frequency" && by != "version" && by != "norm") {
      throw std::invalid_argument("unknown by '" + by + "'");
    }
    policy.by = by == "norm"      ? kvtable::RankBy::kNorm
                : by == "version" ? kvtable::RankBy::kVersion
                                  : kvtable::RankBy::kFrequency;
  } else {
    throw std::invalid_argument("unknown policy '" + name + "'");
  }
  return policy;
}

TablePolicies TablePolicies::Parse(const std::string& json) {
  TablePolicies policies;
  if (json.empty()) return policies;
  const Json object = Json::Parse(json);
  if (object.type() != Json::Type::kObject)
    throw std::invalid_argument("policies are no JSON object: " + json);
  policies.json = json;
  if (object.Has("admission")) policies.admission = AdmissionFromJson(object.At("admission"));
  if (object.Has("padding_key")) policies.padding_key = object.Bits("padding_key");
  if (object.Has("expiry")) {
    for (const Json& policy : object.Array("expiry")) policies.expiry.push_back(EvictPolicyFromJson(policy));
    kvtable::CheckPolicies(policies.expiry);
  }
  if (object.Has("expire_every")) policies.expire_every = object.Int("expire_every");
  if (policies.expire_every < 0) {
    throw std::invalid_argument("expire_every is " + std::to_string(policies.expire_every));
  }
  policies.expire_on_save = object.Bool("expire_on_save", false);
  return policies;
}

std::string TablePolicies::Fields() const {
  const size_t open = json.find('{');
  const size_t close = json.rfind('}');
  return open == std::string::npos ? "" : json.substr(open + 1, close - open - 1);
}

}  // namespace kvtools
