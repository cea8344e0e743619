// kvtools._snapshot.Writer.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <optional>
#include <string>

#include "snapshot/snapshot_writer.h"
#include "snapshot_arguments.h"
#include "snapshot_bindings.h"
#include "thread_pools.h"

using nb::literals::operator""_a;

namespace kvtable {
namespace {

// A writer, and the types of the table that was begun, by which arrays are checked.
class PythonWriter {
 public:
  PythonWriter(const std::string& path, int64_t memory)
      : writer_(std::make_unique<SnapshotWriter>(path, memory)) {}

  void BeginTable(const std::string& name, const std::string& key_dtype, const std::string& value_dtype,
                  int64_t dim, int64_t rows, const std::string& rows_as, const std::string& freq_dtype,
                  const std::string& version_dtype) {
    SnapshotTablePlan plan;
    plan.name = name;
    plan.key_type = TypeNamed<KeyType>(kKeyTypeNames, key_dtype);
    plan.value_type = TypeNamed<ValueType>(kValueTypeNames, value_dtype);
    plan.dim = dim;
    plan.rows = rows;
    if (rows_as == "int8") {
      plan.form = RowForm::kInt8;
    } else if (rows_as == "int4") {
      plan.form = RowForm::kInt4;
    } else if (!rows_as.empty()) {
      ThrowValue("rows are kept as they are, as int8 or as int4.");
    }
    plan.frequency_type = TypeNamed<uint8_t>(kCounterNames, freq_dtype);
    plan.version_type = TypeNamed<uint8_t>(kCounterNames, version_dtype);
    if (dim < 1 || rows < 0 || dim > (INT32_MAX - 4) / SizeOf(plan.value_type)) {
      ThrowValue("a table of a snapshot has rows of 1 to 2 GiB.");
    }
    if (plan.form != RowForm::kPlain && plan.value_type != ValueType::kFloat32)
      ThrowValue("rows are quantized from float32 only.");
    Writer().BeginTable(plan);
    plan_ = plan;
  }

  void AddKeys(nb::handle keys) {
    const KeyPatterns patterns(keys, plan_.key_type);
    SnapshotWriter& writer = Writer();
    const nb::gil_scoped_release release;
    writer.AddKeys(patterns.data(), patterns.size());
  }

  int64_t SortKeys(int threads) {
    const std::shared_ptr<ParallelFor> pool = PoolOf(threads);
    SnapshotWriter& writer = Writer();
    const nb::gil_scoped_release release;
    return writer.SortKeys(*pool);
  }

  void AddRows(int64_t first, nb::handle values, nb::handle freqs, nb::handle versions) {
    const ArrayView rows("values", values, Numpy::Get().Dtype(NameOf(plan_.value_type)), false);
    if (rows.shape().size() != 2)
      ThrowValue("values has shape " + TextOf(rows.shape()) + "; expected (n, dim).");
    const int64_t n = rows.shape()[0];
    rows.ExpectShape("values", {n, plan_.dim});
    std::optional<ArrayView> counters[2];
    const auto view = [&](int i, const char* what, nb::handle array, uint8_t type) -> const void* {
      if (type == 0) return nullptr;
      counters[i].emplace(what, array, Numpy::Get().Dtype(kCounterNames[type]), false);
      counters[i]->ExpectShape(what, {n});
      return counters[i]->data();
    };
    const void* const freq = view(0, "freqs", freqs, plan_.frequency_type);
    const void* const version = view(1, "versions", versions, plan_.version_type);
    SnapshotWriter& writer = Writer();
    const nb::gil_scoped_release release;
    writer.AddRows(first, n, rows.data(), freq, version);
  }

  void SetDefaultRow(nb::handle row) {
    const ArrayView view("default row", row, Numpy::Get().Dtype(NameOf(plan_.value_type)), false);
    view.ExpectShape("default row", {plan_.dim});
    Writer().SetDefaultRow(view.data());
  }

  void EndTable() {
    SnapshotWriter& writer = Writer();
    const nb::gil_scoped_release release;
    writer.EndTable();
  }

  bool CopyTable(const SnapshotTable& table, const nb::object& go_on, bool background) {
    SnapshotWriter& writer = Writer();
    Snapshot::GoOn asks;
    if (!go_on.is_none()) {
      asks = [&go_on](int64_t done, int64_t total) {
        const nb::gil_scoped_acquire acquire;
        return nb::cast<bool>(nb::bool_(go_on(done, total)));
      };
    }
    const std::shared_ptr<ParallelFor> pool = background ? MakeBackgroundThreads(1) : PoolOf(1);
    const nb::gil_scoped_release release;
    return writer.CopyTable(table, *pool, asks);
  }

  void Close(const nb::bytes& json) {
    const std::string text(json.c_str(), json.size());
    SnapshotWriter& writer = Writer();
    {
      const nb::gil_scoped_release release;
      writer.Close(text);
    }
    writer_.reset();
  }

  void Abort() { writer_.reset(); }

 private:
  SnapshotWriter& Writer() {
    if (writer_ == nullptr) ThrowValue("the snapshot is closed.");
    return *writer_;
  }

  std::unique_ptr<SnapshotWriter> writer_;
  SnapshotTablePlan plan_;
};

}  // namespace

void BindSnapshotWriter(nb::module_& m) {
  nb::class_<PythonWriter>(m, "Writer",
                           "Writes a snapshot: for each table the keys, then the rows in any order.")
      .def(nb::init<const std::string&, int64_t>(), "path"_a, "memory"_a)
      .def("begin_table", &PythonWriter::BeginTable, "name"_a, nb::kw_only(), "key_dtype"_a, "value_dtype"_a,
           "dim"_a, "rows"_a, "rows_as"_a = "", "freq_dtype"_a = "", "version_dtype"_a = "")
      .def("add_keys", &PythonWriter::AddKeys, "keys"_a)
      .def("sort_keys", &PythonWriter::SortKeys, "threads"_a = 0)
      .def("add_rows", &PythonWriter::AddRows, "first"_a, "values"_a, "freqs"_a = nb::none(),
           "versions"_a = nb::none())
      .def("set_default_row", &PythonWriter::SetDefaultRow, "row"_a)
      .def("end_table", &PythonWriter::EndTable)
      .def("copy_table", &PythonWriter::CopyTable, "table"_a, "go_on"_a = nb::none(), "background"_a = false)
      .def("close", &PythonWriter::Close, "json"_a)
      .def("abort", &PythonWriter::Abort);
}

}  // namespace kvtable
