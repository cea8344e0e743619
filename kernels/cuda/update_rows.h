// Launches the update of rows by an optimizer, by name: of the kernel bodies for each rule and value type.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kvtable/optimizer.h"
#include "optimizers/adam_rules.h"
#include "optimizers/gradient_rules.h"
#include "optimizers/group_rules.h"
#include "row_lanes.h"
#include "update_kernels.h"
#include "values/elements.h"

namespace kvtable {

// Of a row's elements, how many a lane holds at once: two where any number will do, so that the loads of two
// are on their way together; four for rules that couple elements, so that rows of up to 64 fit.
inline constexpr int kHeldOfPiece = 2;
inline constexpr int kHeldOfRow = 4;

// For UpdateInMemoryBody; none where a rule needs none.
struct WorkingMemory {
  static constexpr int64_t kMostBytes = int64_t{64} << 20;  // where one tile is content with that
  static constexpr int64_t kMostTiles = 4096;

  uint64_t tiles = 0;
  int64_t bytes = 0;
  void* memory = nullptr;
};

template <class Device, class Rule, class T>
constexpr bool FitsRegisters(int64_t dim) {
  constexpr uint32_t kLanes = RowTile<typename Device::Lanes>::kCount;
  return !kCouplesElements<Rule> || (kLanes > 1 && dim <= int64_t{kLanes} * kHeldOfRow);
}

// Calls visit(Rule{}) with the rule of this name; false where the list has none such.
template <class... Rules, class Visit>
bool VisitRule(RuleList<Rules...>, const char* name, const Visit& visit) {
  const auto try_one = [&](auto rule) {
    if (std::strcmp(name, decltype(rule)::kName) != 0) return false;
    visit(rule);
    return true;
  };
  return (try_one(Rules{}) || ...);
}

inline bool CouplesElements(const OptimizerSpec& optimizer) {
  bool couples = false;
  const auto visit = [&](auto rule) { couples = kCouplesElements<decltype(rule)>; };
  VisitRule(GradientRuleList{}, optimizer.name, visit) || VisitRule(AdamRuleList{}, optimizer.name, visit) ||
      VisitRule(GroupRuleList{}, optimizer.name, visit);
  return couples;
}

// What a batch of n rows needs. The memory is the caller's to give.
template <class Device>
WorkingMemory WorkingMemoryFor(const OptimizerSpec& optimizer, ValueType value_type, int64_t dim, int64_t n) {
  WorkingMemory working;
  VisitValueType(value_type, [&](auto t) {
    using T = decltype(t);
    const auto visit = [&](auto r) {
      using Rule = decltype(r);
      if (FitsRegisters<Device, Rule, T>(dim)) return;
      const int64_t each = UpdateInMemoryBody<Rule, T>::WorkingElements(dim) *
                           static_cast<int64_t>(sizeof(typename Element<T>::Compute));
      const int64_t tiles =
          std::max<int64_t>(1, std::min({n, WorkingMemory::kMostTiles, WorkingMemory::kMostBytes / each}));
      working.tiles = static_cast<uint64_t>(tiles);
      working.bytes = tiles * each;
    };
    VisitRule(GradientRuleList{}, optimizer.name, visit) ||
        VisitRule(AdamRuleList{}, optimizer.name, visit) || VisitRule(GroupRuleList{}, optimizer.name, visit);
  });
  return working;
}

// False where the rule is not one of the list.
template <class Device, class... Rules>
bool UpdateRowsBy(RuleList<Rules...> list, Device* device, const RowsToUpdate& rows, const Update& update,
                  ValueType value_type, const WorkingMemory& working) {
  return VisitRule(list, update.optimizer->name, [&](auto r) {
    using Rule = decltype(r);
    VisitValueType(value_type, [&](auto t) {
      using T = decltype(t);
      using C = typename Element<T>::Compute;
      constexpr uint32_t kLanes = RowTile<typename Device::Lanes>::kCount;
      static_assert(1 + Rule::kSlots.size() <= RowsToUpdate::kMostColumns);
      const auto constants = MakeConstants<Rule, C>(update);
      if constexpr (!kCouplesElements<Rule>) {
        device->Launch(rows.batch.n * kLanes, UpdateHeldBody<Rule, T, kHeldOfPiece>{rows, constants});
      } else {
        if constexpr (kLanes > 1) {
          if (working.tiles == 0) {
            device->Launch(rows.batch.n * kLanes, UpdateHeldBody<Rule, T, kHeldOfRow>{rows, constants});
            return;
          }
        }
        device->Launch(working.tiles * kLanes, UpdateInMemoryBody<Rule, T>{rows, constants, working.tiles,
                                                                           static_cast<C*>(working.memory)});
      }
    });
  });
}

// By whichever list has the rule.
template <class Device>
void UpdateRows(Device* device, const RowsToUpdate& rows, const Update& update, ValueType value_type,
                const WorkingMemory& working) {
  UpdateRowsBy(GradientRuleList{}, device, rows, update, value_type, working) ||
      UpdateRowsBy(AdamRuleList{}, device, rows, update, value_type, working) ||
      UpdateRowsBy(GroupRuleList{}, device, rows, update, value_type, working);
}

}  // namespace kvtable
