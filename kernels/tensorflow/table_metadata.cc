#include "table_metadata.h"

#include <stdexcept>

namespace kvtools {

namespace {

struct EvictionEntry {
  const char* name;
  kvtable::Eviction eviction;
};

constexpr EvictionEntry kEvictions[] = {{"lru", kvtable::Eviction::kLru},
                                        {"lfu", kvtable::Eviction::kLfu},
                                        {"custom", kvtable::Eviction::kCustom},
                                        {"epoch_lru", kvtable::Eviction::kEpochLru},
                                        {"epoch_lfu", kvtable::Eviction::kEpochLfu}};

}  // namespace

std::string EvictionName(kvtable::Eviction eviction) {
  for (const EvictionEntry& entry : kEvictions) {
    if (entry.eviction == eviction) return entry.name;
  }
  return "";
}

kvtable::Eviction EvictionNamed(const std::string& name) {
  for (const EvictionEntry& entry : kEvictions) {
    if (name == entry.name) return entry.eviction;
  }
  throw std::invalid_argument("unknown eviction '" + name + "'");
}

bool HasEpochs(kvtable::Eviction eviction) {
  return eviction == kvtable::Eviction::kEpochLru || eviction == kvtable::Eviction::kEpochLfu;
}

std::vector<kvtable::SlotSpec> SlotsFromJson(const Json& array) {
  constexpr int64_t kMaxWidth = int64_t{1} << 24;  // the table engine's
  std::vector<kvtable::SlotSpec> slots;
  for (const Json& item : array.items()) {
    kvtable::SlotSpec slot;
    slot.name = item.String("name");
    slot.width = item.Int("width");
    if (slot.width < 1 || slot.width > kMaxWidth) {
      throw std::invalid_argument("slot '" + slot.name + "' has width " + std::to_string(slot.width) +
                                  ", expected 1 to " + std::to_string(kMaxWidth));
    }
    const std::string& init = item.String("init");
    if (init == "copy_value") {
      slot.init = kvtable::SlotSpec::Init::kCopyValue;
    } else if (init == "constant") {
      slot.constant = item.Double("constant", 0.0);
    } else {
      throw std::invalid_argument("slot '" + slot.name + "' has unknown init '" + init + "'");
    }
    slots.push_back(std::move(slot));
  }
  return slots;
}

namespace {

struct InitializerKind {
  const char* name;
  kvtable::Initializer::Kind kind;
};

constexpr InitializerKind kInitializerKinds[] = {
    {"constant", kvtable::Initializer::Kind::kConstant},
    {"uniform", kvtable::Initializer::Kind::kUniform},
    {"normal", kvtable::Initializer::Kind::kNormal},
    {"truncated_normal", kvtable::Initializer::Kind::kTruncatedNormal},
    {"rows", kvtable::Initializer::Kind::kRows},
};

}  // namespace

kvtable::Initializer InitializerFromJson(const Json& object) {
  kvtable::Initializer initializer;
  const std::string& name = object.String("kind");
  bool known = false;
  for (const InitializerKind& entry : kInitializerKinds) {
    if (name == entry.name) {
      initializer.kind = entry.kind;
      known = true;
    }
  }
  if (!known) throw std::invalid_argument("unknown initializer kind '" + name + "'");
  initializer.a = object.Double("a", 0.0);
  initializer.b = object.Double("b", 0.0);
  if (object.Has("seed")) initializer.seed = object.Uint("seed");
  return initializer;
}

std::string SlotsToJson(const std::vector<kvtable::SlotSpec>& slots) {
  std::string out = "[";
  for (const kvtable::SlotSpec& slot : slots) {
    if (out.size() > 1) out += ", ";
    out += "{\"name\": " + JsonQuote(slot.name) + ", \"width\": " + std::to_string(slot.width);
    if (slot.init == kvtable::SlotSpec::Init::kCopyValue) {
      out += ", \"init\": \"copy_value\"}";
    } else {
      out += ", \"init\": \"constant\", \"constant\": " + JsonNumber(slot.constant) + "}";
    }
  }
  return out + "]";
}

std::string InitializerToJson(const kvtable::Initializer& initializer) {
  std::string name;
  for (const InitializerKind& entry : kInitializerKinds) {
    if (initializer.kind == entry.kind) name = entry.name;
  }
  return "{\"kind\": " + JsonQuote(name) + ", \"a\": " + JsonNumber(initializer.a) +
         ", \"b\": " + JsonNumber(initializer.b) + ", \"seed\": " + std::to_string(initializer.seed) + "}";
}

}  // namespace kvtools
