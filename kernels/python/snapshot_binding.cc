// kvtools._snapshot.Snapshot and Table.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "kvtable/snapshot.h"
#include "snapshot/format.h"
#include "snapshot_arguments.h"
#include "snapshot_bindings.h"
#include "thread_pools.h"

using nb::literals::operator""_a;

namespace kvtable {
namespace {

constexpr int64_t kReleaseFrom = 256;  // keys: below that, giving the GIL away costs more than it brings

template <class Body>
auto WithoutGil(const SnapshotTable& table, int64_t keys, const Body& body) {
  // A key may take a mebibyte from the disk where they are verified.
  if (keys < kReleaseFrom && !table.verifies_on_use()) return body();
  const nb::gil_scoped_release release;
  return body();
}

// The row for missing keys, or none.
class MissingRow {
 public:
  MissingRow(nb::handle row, int64_t dim, const char* dtype) {
    if (row.is_none()) return;
    view_.emplace("missing", row, Numpy::Get().Dtype(dtype), false);
    view_->ExpectShape("missing", {dim});
  }
  const void* data() const { return view_ ? view_->data() : nullptr; }

 private:
  std::optional<ArrayView> view_;
};

nb::object Find(const SnapshotTable& table, nb::handle keys) {
  const KeyPatterns patterns(keys, table.key_type());
  const NewArray rows(patterns.shape(), "int64");
  WithoutGil(table, patterns.size(),
             [&] { table.Find(patterns.data(), patterns.size(), rows.data<int64_t>()); });
  return rows.Take();
}

nb::tuple Lookup(const SnapshotTable& table, nb::handle keys, nb::handle missing, bool as_float32) {
  const KeyPatterns patterns(keys, table.key_type());
  const char* const dtype = as_float32 ? "float32" : NameOf(table.value_type());
  const NewArray values(WithWidth(patterns.shape(), table.dim()), dtype), found(patterns.shape(), "bool");
  const MissingRow row(missing, table.dim(), dtype);
  WithoutGil(table, patterns.size(), [&] {
    if (as_float32) {
      table.Lookup(patterns.data(), patterns.size(), values.data<float>(), found.data<uint8_t>(),
                   static_cast<const float*>(row.data()));
    } else {
      table.LookupRaw(patterns.data(), patterns.size(), values.data<void>(), found.data<uint8_t>(),
                      row.data());
    }
  });
  return nb::make_tuple(values.Take(), found.Take());
}

nb::tuple Pool(const SnapshotTable& table, nb::handle keys, nb::handle splits, const std::string& combiner,
               nb::handle weights, nb::handle missing) {
  const KeyPatterns patterns(keys, table.key_type());
  const ArrayView bounds("splits", splits, DtypeNamed("int64"), false);
  const auto* const split = static_cast<const int64_t*>(bounds.data());
  if (bounds.shape().size() != 1 || bounds.size() == 0 || split[bounds.size() - 1] != patterns.size()) {
    ThrowValue("splits end elsewhere than the " + std::to_string(patterns.size()) + " keys do.");
  }
  Combiner how = Combiner::kSum;
  if (combiner == "mean") {
    how = Combiner::kMean;
  } else if (combiner == "sqrtn") {
    how = Combiner::kSqrtN;
  } else if (combiner != "sum") {
    ThrowValue("combiner is '" + combiner + "'; expected 'sum', 'mean' or 'sqrtn'.");
  }
  std::optional<ArrayView> weight;
  if (!weights.is_none()) {
    weight.emplace("weights", weights, DtypeNamed("float32"), false);
    weight->ExpectShape("weights", {patterns.size()});
  }
  const int64_t bags = bounds.size() - 1;
  const NewArray pooled({bags, table.dim()}, "float32");
  const MissingRow row(missing, table.dim(), "float32");
  const int64_t absent = WithoutGil(table, patterns.size(), [&] {
    return table.Pool(patterns.data(), split, bags, how,
                      weight ? static_cast<const float*>(weight->data()) : nullptr, pooled.data<float>(),
                      static_cast<const float*>(row.data()));
  });
  return nb::make_tuple(pooled.Take(), absent);
}

// Columns of rows, by what `read_keys(int64 *)`, `read_values(void *)` and `read_column(section, width, void *)` do.
template <class Keys, class Values, class Column>
nb::tuple ReadColumns(const SnapshotTable& table, int64_t n, bool values, bool freqs, bool versions,
                      const Keys& read_keys, const Values& read_values, const Column& read_column) {
  const NewArray patterns({n}, "int64");
  nb::object columns[3] = {nb::none(), nb::none(), nb::none()};
  {
    const nb::gil_scoped_release release;
    read_keys(patterns.data<int64_t>());
  }
  if (values) {
    const NewArray to({n, table.dim()}, NameOf(table.value_type()));
    {
      const nb::gil_scoped_release release;
      read_values(to.data<void>());
    }
    columns[0] = to.Take();
  }
  const auto counter = [&](SnapshotTable::Section section, uint8_t type) {
    const NewArray to({n}, kCounterNames[type]);
    {
      const nb::gil_scoped_release release;
      read_column(section, snapshot_format::kCounterBytes[type], to.data<void>());
    }
    return to.Take();
  };
  const SnapshotTable::Layout& layout = table.layout();
  if (freqs && layout.frequency_type != 0)
    columns[1] = counter(SnapshotTable::kFrequencies, layout.frequency_type);
  if (versions && layout.version_type != 0)
    columns[2] = counter(SnapshotTable::kVersions, layout.version_type);
  nb::object keys = patterns.Take();
  if (table.key_type() == KeyType::kInt32) keys = keys.attr("astype")("int32");
  if (table.key_type() == KeyType::kUint64) keys = keys.attr("view")("uint64");
  return nb::make_tuple(keys, columns[0], columns[1], columns[2]);
}

nb::tuple Read(const SnapshotTable& table, int64_t first, int64_t n, bool values, bool freqs, bool versions,
               bool verify) {
  if (first < 0 || n < 0 || n > table.positions() - first) ThrowValue("such rows are not in the table.");
  if (verify) {
    const nb::gil_scoped_release release;
    const auto check = [&](SnapshotTable::Section section) {
      const int64_t rows = table.layout().rows;
      const int64_t width = rows == 0 ? 0 : table.layout().sections[section].bytes / rows;
      table.Verify(section, first * width, (first + n) * width);
    };
    check(SnapshotTable::kKeys);
    if (values) check(SnapshotTable::kRows);
    if (freqs) check(SnapshotTable::kFrequencies);
    if (versions) check(SnapshotTable::kVersions);
  }
  return ReadColumns(
      table, n, values, freqs, versions, [&](int64_t* keys) { table.ReadKeys(first, n, keys); },
      [&](void* out) { table.ReadRows(first, n, out); },
      [&](SnapshotTable::Section section, int64_t width, void* out) {
        table.ReadColumn(section, width, first, n, out);
      });
}

nb::tuple Take(const SnapshotTable& table, nb::handle rows, bool values, bool freqs, bool versions) {
  const ArrayView numbers("rows", rows, DtypeNamed("int64"), false);
  const auto* const row = static_cast<const int64_t*>(numbers.data());
  const int64_t n = numbers.size();
  for (int64_t i = 0; i < n; ++i) {
    if (row[i] < 0 || row[i] >= table.positions())
      ThrowValue("row " + std::to_string(row[i]) + " is not in the table.");
  }
  return ReadColumns(
      table, n, values, freqs, versions, [&](int64_t* keys) { table.TakeKeys(row, n, keys); },
      [&](void* out) { table.TakeRows(row, n, out); },
      [&](SnapshotTable::Section section, int64_t width, void* out) {
        table.TakeColumn(section, width, row, n, out);
      });
}

nb::object DefaultRow(const SnapshotTable& table) {
  const void* const row = table.default_row();
  if (row == nullptr) return nb::none();
  const NewArray copy({table.dim()}, NameOf(table.value_type()));
  std::memcpy(copy.data<void>(), row, static_cast<size_t>(table.value_bytes()));
  return copy.Take();
}

std::optional<std::string> CounterName(uint8_t type) {
  if (type == 0) return std::nullopt;
  return kCounterNames[type];
}

// A Python callable that says whether to go on; called from a thread that does not hold the GIL.
Snapshot::GoOn GoOnOf(const nb::object& callable) {
  if (callable.is_none()) return {};
  return [&callable](int64_t done, int64_t total) {
    const nb::gil_scoped_acquire acquire;
    return nb::cast<bool>(nb::bool_(callable(done, total)));
  };
}

std::shared_ptr<ParallelFor> ThreadsFor(int threads, bool background) {
  return background ? MakeBackgroundThreads(threads) : PoolOf(threads);
}

bool Populate(Snapshot& snapshot, int threads, const nb::object& go_on, bool background) {
  const Snapshot::GoOn asks = GoOnOf(go_on);
  const std::shared_ptr<ParallelFor> pool = ThreadsFor(threads, background);
  const nb::gil_scoped_release release;
  return snapshot.Populate(*pool, asks);
}

bool Verify(const Snapshot& snapshot, int threads, const nb::object& go_on, bool background) {
  const Snapshot::GoOn asks = GoOnOf(go_on);
  const std::shared_ptr<ParallelFor> pool = ThreadsFor(threads, background);
  const nb::gil_scoped_release release;
  return snapshot.Verify(*pool, asks);
}

std::shared_ptr<Snapshot> Open(const std::string& path) {
  const nb::gil_scoped_release release;
  return Snapshot::Open(path);
}

}  // namespace

void BindSnapshots(nb::module_& m) {
  nb::class_<SnapshotTable> of_table(m, "Table", "One table of a snapshot. Any thread.");
  of_table
      .def_prop_ro("name", [](const SnapshotTable& t) { return nb::bytes(t.name().data(), t.name().size()); })
      .def_prop_ro("key_dtype", [](const SnapshotTable& t) { return NameOf(t.key_type()); })
      .def_prop_ro("value_dtype", [](const SnapshotTable& t) { return NameOf(t.value_type()); })
      .def_prop_ro("quantized", &SnapshotTable::quantized)
      .def_prop_ro("row_form", [](const SnapshotTable& t) { return static_cast<int>(t.layout().form); })
      .def_prop_ro("dim", &SnapshotTable::dim)
      .def_prop_ro("rows", &SnapshotTable::rows)
      .def_prop_ro("row_bytes", [](const SnapshotTable& t) { return t.layout().row_bytes; })
      .def_prop_ro("bytes",
                   [](const SnapshotTable& t) {
                     int64_t bytes = t.level_bytes();
                     for (const SnapshotTable::Range& range : t.layout().sections) bytes += range.bytes;
                     return bytes;
                   })
      .def_prop_ro("duplicates", [](const SnapshotTable& t) { return t.layout().duplicates; })
      .def_prop_ro("freq_dtype",
                   [](const SnapshotTable& t) { return CounterName(t.layout().frequency_type); })
      .def_prop_ro("version_dtype",
                   [](const SnapshotTable& t) { return CounterName(t.layout().version_type); })
      .def_prop_ro("default_row", &DefaultRow)
      .def("find", &Find, "keys"_a)
      .def("lookup", &Lookup, "keys"_a, nb::kw_only(), "missing"_a = nb::none(), "as_float32"_a = false)
      .def("pool", &Pool, "keys"_a, "splits"_a, "combiner"_a = "sum", nb::kw_only(), "weights"_a = nb::none(),
           "missing"_a = nb::none())
      .def("verify_directory",
           [](const SnapshotTable& t) {
             const nb::gil_scoped_release release;
             t.Verify(SnapshotTable::kDirectory, 0, t.layout().sections[SnapshotTable::kDirectory].bytes);
           })
      .def("read", &Read, "first"_a, "n"_a, nb::kw_only(), "values"_a = true, "freqs"_a = true,
           "versions"_a = true, "verify"_a = false)
      .def("take", &Take, "rows"_a, nb::kw_only(), "values"_a = true, "freqs"_a = true, "versions"_a = true);
  BindSnapshotLevels(m, of_table);

  nb::class_<Snapshot>(m, "Snapshot",
                       "An open snapshot: its bytes are mapped, and stay so as long as a table is in use.")
      .def_prop_ro("bytes", &Snapshot::bytes)
      .def_prop_ro("identity", &Snapshot::identity)
      .def_prop_ro("fingerprint", &Snapshot::fingerprint)
      .def_prop_ro(
          "description",
          [](const Snapshot& s) { return nb::bytes(s.description().data(), s.description().size()); })
      .def_prop_ro("tables",
                   [](const Snapshot& s) {
                     nb::list tables;
                     for (const SnapshotTable& table : s.tables()) {
                       tables.append(nb::cast(&table, nb::rv_policy::reference_internal, nb::find(&s)));
                     }
                     return tables;
                   })
      .def_prop_ro("warm", &Snapshot::warm)
      .def_prop_ro("resident", &Snapshot::resident)
      .def("populate", &Populate, "threads"_a = 4, "go_on"_a = nb::none(), "background"_a = false)
      .def("verify", &Verify, "threads"_a = 0, "go_on"_a = nb::none(), "background"_a = false)
      .def_prop_ro("verifies_on_use", &Snapshot::verifies_on_use)
      .def("verify_on_use", &Snapshot::VerifyOnUse)
      .def("trust", &Snapshot::Trust, "identity"_a)
      .def("is_at", &Snapshot::IsAt, "path"_a)
      .def("look", &Snapshot::Look)
      .def("check_unchanged", &Snapshot::CheckUnchanged);

  m.def("open", &Open, "path"_a,
        "Map a snapshot; raises ValueError where it is none, RuntimeError where it cannot be read.");
}

}  // namespace kvtable
