// kvtools._snapshot.Level: rows that lie over a table of a snapshot.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "kvtable/snapshot.h"
#include "snapshot/snapshot_level.h"
#include "snapshot_arguments.h"
#include "snapshot_bindings.h"

using nb::literals::operator""_a;

namespace kvtable {
namespace {

// nanobind holds what it binds by pointers to what may be changed; nothing here changes one.
struct Level {
  std::shared_ptr<const SnapshotLevel> level;
};

Level Make(const SnapshotTable& table, nb::handle keys, nb::handle values, nb::handle removed) {
  const KeyPatterns patterns(keys, table.key_type()), gone(removed, table.key_type());
  const ArrayView rows("values", values, Numpy::Get().Dtype(NameOf(table.value_type())), false);
  rows.ExpectShape("values", {patterns.size(), table.dim()});
  const nb::gil_scoped_release release;
  return {
      SnapshotLevel::Make(table, patterns.data(), patterns.size(), rows.data(), gone.data(), gone.size())};
}

Level Merge(const Level& older, const Level& newer) {
  const nb::gil_scoped_release release;
  return {SnapshotLevel::Merge(*older.level, *newer.level)};
}

}  // namespace

void BindSnapshotLevels(nb::module_& m, nb::class_<SnapshotTable>& table) {
  nb::class_<Level>(m, "Level", "What changed in a table of a snapshot. Immutable.")
      .def_prop_ro("entries", [](const Level& l) { return l.level->entries(); })
      .def_prop_ro("removed", [](const Level& l) { return l.level->removed(); })
      .def_prop_ro("bytes", [](const Level& l) { return l.level->bytes(); })
      .def("under", &Merge, "newer"_a);
  table.def("level", &Make, "keys"_a, "values"_a, "removed"_a)
      .def(
          "overlaid",
          [](const SnapshotTable& t, const std::vector<Level>& levels, int64_t rows) {
            std::vector<std::shared_ptr<const SnapshotLevel>> over;
            for (const Level& level : levels) over.push_back(level.level);
            return t.Overlaid(std::move(over), rows);
          },
          "levels"_a, "rows"_a, nb::keep_alive<0, 1>())
      .def_prop_ro("positions", &SnapshotTable::positions)
      .def_prop_ro("level_bytes", &SnapshotTable::level_bytes)
      .def_prop_ro("levels", [](const SnapshotTable& t) { return static_cast<int>(t.levels().size()); });
}

}  // namespace kvtable
