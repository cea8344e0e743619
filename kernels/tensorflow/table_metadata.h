// What a table is, in words: metadata of checkpoints, as docs/checkpoint-layout.md has it, and attributes of
// ops.
#pragma once

#include <string>
#include <vector>

#include "json.h"
#include "kvtable/table.h"

namespace kvtools {

// "lru", "lfu", "custom", "epoch_lru" or "epoch_lfu". The second throws std::invalid_argument.
std::string EvictionName(kvtable::Eviction eviction);
kvtable::Eviction EvictionNamed(const std::string& name);

// Whether SetEpoch is for such tables.
bool HasEpochs(kvtable::Eviction eviction);

// These throw std::invalid_argument naming what is missing, of another type, or out of range.
std::vector<kvtable::SlotSpec> SlotsFromJson(const Json& array);
kvtable::Initializer InitializerFromJson(const Json& object);

std::string SlotsToJson(const std::vector<kvtable::SlotSpec>& slots);
std::string InitializerToJson(const kvtable::Initializer& initializer);

}  // namespace kvtools
