// kvtools._kvtable: the table engine for Python, over NumPy arrays, without copies. The GIL is released while
// it works.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "kvtable/initializer.h"
#include "kvtable/optimizer.h"
#include "kvtable/parallel_for.h"
#include "kvtable/table.h"
#include "kvtable/types.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace kvtable {
namespace {

// ---- Threads
// ---------------------------------------------------------------------------------------------------------

// One pool for each number of threads, shared by the tables that ask for it: a process may have hundreds of
// tables.
std::shared_ptr<ParallelFor> PoolOf(int threads) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<ParallelFor>> pools;
  std::lock_guard<std::mutex> hold(mutex);
  std::shared_ptr<ParallelFor> pool = pools[threads].lock();
  if (pool == nullptr) {
    pool = MakeThreadPool(threads);
    pools[threads] = pool;
  }
  return pool;
}

// ---- Table
// -----------------------------------------------------------------------------------------------------------

class PyTable;

class PyExporter {
 public:
  PyExporter(std::shared_ptr<PyTable> table, const nb::object& columns, int64_t chunk, bool scores);
  nb::tuple Next();
  int64_t max_rows() const { return exporter_->max_rows(); }

 private:
  std::shared_ptr<PyTable> table_;  // outlives the exporter
  std::unique_ptr<Exporter> exporter_;
  RowSchema schema_;  // as it was when the export began
  std::vector<int> columns_;
  int64_t chunk_;
  bool scores_;
};

class PyTable {
 public:
  PyTable(nb::handle key_dtype, nb::handle value_dtype, int64_t dim, nb::handle initializer, nb::handle slots,
          int64_t capacity_hint, int64_t max_capacity, const std::string& eviction, int shards,
          bool huge_pages, int threads)
      : key_dtype_(DtypeNamed(NameOfDtype(key_dtype))),
        value_dtype_(DtypeNamed(NameOfDtype(value_dtype))),
        bool_dtype_(DtypeNamed("bool")),
        uint32_dtype_(DtypeNamed("uint32")),
        uint64_dtype_(DtypeNamed("uint64")) {
    TableOptions options;
    options.key_type = KeyTypeOf(NameOfDtype(key_dtype));
    options.value_type = ValueTypeOf(NameOfDtype(value_dtype));
    options.dim = dim;
    options.initializer = InitializerOf(initializer, options.value_type, value_dtype_, dim);
    options.slots = SlotsOf(slots);
    options.capacity_hint = capacity_hint;
    options.max_capacity = max_capacity;
    options.eviction = EvictionOf(eviction);
    options.shards = shards;
    options.huge_pages = huge_pages;
    table_ = Table::Create(options);
    pool_ = PoolOf(threads);
  }

  Table& table() { return *table_; }
  ParallelFor& pool() { return *pool_; }
  const nb::object& key_dtype() const { return key_dtype_; }
  const nb::object& value_dtype() const { return value_dtype_; }
  const nb::object& uint32_dtype() const { return uint32_dtype_; }
  const nb::object& uint64_dtype() const { return uint64_dtype_; }

  nb::object Gather(nb::handle keys, nb::handle missing, nb::object out, nb::object found,
                    nb::object positions) {
    const ArrayView k("keys", keys, key_dtype_, false);
    out = OutputArray(out, WithWidth(k.shape(), dim()), value_dtype_);
    const ArrayView o("out", out, value_dtype_, true);
    o.ExpectShape("out", WithWidth(k.shape(), dim()));
    const std::unique_ptr<ArrayView> f = Optional("found", found, bool_dtype_, true, k.shape());
    const std::unique_ptr<ArrayView> p = Optional("positions", positions, uint64_dtype_, true, k.shape());
    Missing policy = Missing::kDefault;
    std::optional<ArrayView> defaults;
    int64_t num_defaults = 0;
    if (nb::isinstance<nb::str>(missing)) {
      const std::string name = TextOf(missing);
      if (name != "zeros" && name != "initial") {
        ThrowValue("missing is '" + name +
                   "'; expected 'zeros', 'initial' or an array (dim,) or (rows, dim).");
      }
      policy = name == "zeros" ? Missing::kZeros : Missing::kInitial;
    } else {
      defaults.emplace("missing", missing, value_dtype_, false);
      const Shape& shape = defaults->shape();
      if (shape.empty() || shape.size() > 2 || shape.back() != dim() || defaults->size() == 0) {
        ThrowValue("missing has shape " + TextOf(shape) + "; expected (" + std::to_string(dim()) +
                   ",) or (rows, " + std::to_string(dim()) + ") with at least one row.");
      }
      num_defaults = defaults->size() / dim();
    }
    {
      nb::gil_scoped_release unlocked;
      table_->Gather(k.data(), k.size(), {o.data(), PositionsOf(p)}, policy,
                     defaults ? defaults->data() : nullptr, num_defaults,
                     f ? static_cast<bool*>(f->data()) : nullptr, *pool_);
    }
    return out;
  }

  nb::object GatherOrInsert(nb::handle keys, uint32_t frequency, uint32_t version, double admission,
                            uint64_t seed, nb::object out, nb::object inserted, nb::object positions) {
    return Insert(keys, {{frequency, version}, nullptr, admission, seed, nullptr}, out, inserted, positions);
  }

  nb::tuple GatherOrInsertEvicting(nb::handle keys, uint32_t frequency, uint32_t version, double admission,
                                   uint64_t seed, nb::object out, nb::object inserted, nb::object positions) {
    Evicted evicted(table_->dim() * SizeOf(table_->value_type()), SizeOf(table_->key_type()));
    const nb::object rows =
        Insert(keys, {{frequency, version}, nullptr, admission, seed, &evicted}, out, inserted, positions);
    const nb::object evicted_keys = OutputArray(nb::none(), {evicted.n}, key_dtype_);
    const nb::object evicted_rows = OutputArray(nb::none(), {evicted.n, dim()}, value_dtype_);
    const ArrayView k("keys", evicted_keys, key_dtype_, true);
    const ArrayView r("rows", evicted_rows, value_dtype_, true);
    std::copy(evicted.keys.begin(), evicted.keys.end(), static_cast<char*>(k.data()));
    std::copy(evicted.values.begin(), evicted.values.end(), static_cast<char*>(r.data()));
    return nb::make_tuple(rows, evicted_keys, evicted_rows);
  }

  nb::object Insert(nb::handle keys, Insertion insertion, nb::object out, const nb::object& inserted,
                    const nb::object& positions) {
    const ArrayView k("keys", keys, key_dtype_, false);
    out = OutputArray(out, WithWidth(k.shape(), dim()), value_dtype_);
    const ArrayView o("out", out, value_dtype_, true);
    o.ExpectShape("out", WithWidth(k.shape(), dim()));
    const std::unique_ptr<ArrayView> f = Optional("inserted", inserted, bool_dtype_, true, k.shape());
    const std::unique_ptr<ArrayView> p = Optional("positions", positions, uint64_dtype_, true, k.shape());
    {
      nb::gil_scoped_release unlocked;
      insertion.inserted = f ? static_cast<bool*>(f->data()) : nullptr;
      table_->GatherOrInsert(k.data(), k.size(), {o.data(), PositionsOf(p)}, insertion, *pool_);
    }
    return out;
  }

  nb::list GatherColumns(nb::handle keys, const nb::object& columns, const nb::object& found) {
    const ArrayView k("keys", keys, key_dtype_, false);
    const std::unique_ptr<ArrayView> f = Optional("found", found, bool_dtype_, true, k.shape());
    nb::list arrays;
    std::vector<std::unique_ptr<ArrayView>> views;
    std::vector<ColumnOut> outs;
    const RowSchema schema = table_->schema();
    for (int column : ColumnsOf(columns, schema)) {
      MakeColumn(k.shape(), column, schema, &arrays, &views, &outs);
    }
    {
      nb::gil_scoped_release unlocked;
      table_->GatherColumns(k.data(), k.size(), outs, f ? static_cast<bool*>(f->data()) : nullptr, *pool_);
    }
    return arrays;
  }

  nb::object Contains(nb::handle keys, nb::object out) {
    const ArrayView k("keys", keys, key_dtype_, false);
    out = OutputArray(out, k.shape(), bool_dtype_);
    const ArrayView o("out", out, bool_dtype_, true);
    o.ExpectShape("out", k.shape());
    nb::gil_scoped_release unlocked;
    table_->Contains(k.data(), k.size(), static_cast<bool*>(o.data()), *pool_);
    return out;
  }

  nb::tuple GatherStamps(nb::handle keys) {
    const ArrayView k("keys", keys, key_dtype_, false);
    const nb::object freqs = OutputArray(nb::none(), k.shape(), uint32_dtype_);
    const nb::object versions = OutputArray(nb::none(), k.shape(), uint32_dtype_);
    const ArrayView f("frequencies", freqs, uint32_dtype_, true);
    const ArrayView v("versions", versions, uint32_dtype_, true);
    {
      nb::gil_scoped_release unlocked;
      table_->GatherStamps(k.data(), k.size(), static_cast<uint32_t*>(f.data()),
                           static_cast<uint32_t*>(v.data()), *pool_);
    }
    return nb::make_tuple(freqs, versions);
  }

  void Upsert(nb::handle keys, nb::handle values, uint32_t frequency, uint32_t version) {
    const ArrayView k("keys", keys, key_dtype_, false);
    const ArrayView v("values", values, value_dtype_, false);
    v.ExpectShape("values", WithWidth(k.shape(), dim()));
    nb::gil_scoped_release unlocked;
    table_->Upsert(k.data(), k.size(), v.data(), {frequency, version}, *pool_);
  }

  void UpsertColumns(nb::handle keys, const nb::dict& columns, uint32_t frequency, uint32_t version) {
    const ArrayView k("keys", keys, key_dtype_, false);
    std::vector<std::unique_ptr<ArrayView>> views;
    const std::vector<ColumnIn> in = InputColumns(k.shape(), columns, &views);
    nb::gil_scoped_release unlocked;
    table_->UpsertColumns(k.data(), k.size(), in, {frequency, version}, *pool_);
  }

  void Accumulate(nb::handle keys, nb::handle deltas, bool from_zeros, uint32_t frequency, uint32_t version) {
    const ArrayView k("keys", keys, key_dtype_, false);
    const ArrayView d("deltas", deltas, value_dtype_, false);
    d.ExpectShape("deltas", WithWidth(k.shape(), dim()));
    nb::gil_scoped_release unlocked;
    table_->Accumulate(k.data(), k.size(), d.data(), from_zeros, {frequency, version}, *pool_);
  }

  nb::tuple Apply(const std::string& optimizer, nb::handle keys, nb::handle gradients,
                  const nb::dict& hyperparameters, const std::vector<nb::object>& slots,
                  const nb::object& positions, bool stochastic_rounding, uint64_t seed, bool skip_nonfinite,
                  uint32_t frequency, uint32_t version) {
    const ArrayView k("keys", keys, key_dtype_, false);
    const ArrayView g("gradients", gradients, value_dtype_, false);
    g.ExpectShape("gradients", WithWidth(k.shape(), dim()));
    const std::unique_ptr<ArrayView> p =
        Optional("positions", positions, DtypeNamed("uint64"), false, k.shape());
    Update update = UpdateOf(optimizer, hyperparameters);
    update.stochastic_rounding = stochastic_rounding;
    update.seed = seed;
    update.skip_nonfinite = skip_nonfinite;
    const RowSchema schema = table_->schema();
    SlotColumns columns({}, schema.generation);
    for (const nb::object& slot : slots) columns.columns.push_back(ColumnOf(slot, schema.slots));
    ApplyCounts counts;
    {
      nb::gil_scoped_release unlocked;
      counts = table_->Apply(k.data(), p ? static_cast<const uint64_t*>(p->data()) : nullptr, k.size(),
                             g.data(), update, columns, {frequency, version}, *pool_);
    }
    return nb::make_tuple(counts.updated, counts.skipped);
  }

  nb::object Zeroed(nb::handle keys) {
    const ArrayView k("keys", keys, key_dtype_, false);
    const nb::object out = OutputArray(nb::none(), k.shape(), bool_dtype_);
    const ArrayView o("out", out, bool_dtype_, true);
    nb::gil_scoped_release unlocked;
    table_->Zeroed(k.data(), k.size(), static_cast<bool*>(o.data()), *pool_);
    return out;
  }

  int64_t Remove(nb::handle keys) {
    const ArrayView k("keys", keys, key_dtype_, false);
    nb::gil_scoped_release unlocked;
    return table_->Remove(k.data(), k.size(), *pool_);
  }

  nb::object Scores(nb::handle keys) {
    const ArrayView k("keys", keys, key_dtype_, false);
    const nb::object out = OutputArray(nb::none(), k.shape(), uint64_dtype_);
    const ArrayView o("out", out, uint64_dtype_, true);
    nb::gil_scoped_release unlocked;
    table_->Scores(k.data(), k.size(), static_cast<uint64_t*>(o.data()), *pool_);
    return out;
  }

  int64_t SetScores(nb::handle keys, nb::handle scores) {
    const ArrayView k("keys", keys, key_dtype_, false);
    const ArrayView s("scores", scores, uint64_dtype_, false);
    s.ExpectShape("scores", k.shape());
    nb::gil_scoped_release unlocked;
    return table_->SetScores(k.data(), k.size(), static_cast<const uint64_t*>(s.data()), *pool_);
  }

  void Import(nb::handle keys, const nb::dict& columns, const nb::object& frequencies,
              const nb::object& versions, const nb::object& scores) {
    const ArrayView k("keys", keys, key_dtype_, false);
    std::vector<std::unique_ptr<ArrayView>> views;
    const std::vector<ColumnIn> in = InputColumns(k.shape(), columns, &views);
    const std::unique_ptr<ArrayView> f =
        Optional("frequencies", frequencies, uint32_dtype_, false, k.shape());
    const std::unique_ptr<ArrayView> v = Optional("versions", versions, uint32_dtype_, false, k.shape());
    const std::unique_ptr<ArrayView> s = Optional("scores", scores, uint64_dtype_, false, k.shape());
    nb::gil_scoped_release unlocked;
    table_->Import(k.data(), k.size(), in, f ? static_cast<const uint32_t*>(f->data()) : nullptr,
                   v ? static_cast<const uint32_t*>(v->data()) : nullptr,
                   s ? static_cast<const uint64_t*>(s->data()) : nullptr, *pool_);
  }

  uint64_t EnsureSlots(nb::handle specs) {
    const std::vector<SlotSpec> slots = SlotsOf(specs);
    nb::gil_scoped_release unlocked;
    return table_->EnsureSlots(slots, *pool_);
  }

  void SetInitializer(nb::handle spec) {
    table_->SetInitializer(InitializerOf(spec, table_->value_type(), value_dtype_, dim()));
  }

  nb::dict GetInitializer() const {
    return DictOf(table_->initializer(), table_->value_type(), value_dtype_, table_->dim());
  }

  nb::list GetSlots() const { return ListOf(table_->slots()); }

  nb::dict Memory() const {
    MemoryUse use;
    {
      nb::gil_scoped_release unlocked;
      use = table_->Memory();
    }
    nb::dict dict;
    dict["rows"] = use.rows;
    dict["row_bytes"] = use.row_bytes;
    dict["index_bytes"] = use.index_bytes;
    dict["column_bytes"] = use.column_bytes;
    dict["slack_bytes"] = use.slack_bytes;
    dict["overhead_per_row"] = use.overhead_per_row();
    return dict;
  }

  // None (all), or a sequence of column numbers and slot names; 0 or "value" is the value.
  static std::vector<int> ColumnsOf(const nb::object& columns, const RowSchema& schema) {
    const std::vector<SlotSpec>& slots = schema.slots;
    std::vector<int> numbers;
    if (columns.is_none()) {
      for (int i = 0; i <= static_cast<int>(slots.size()); ++i) numbers.push_back(i);
      return numbers;
    }
    for (nb::handle column : columns) numbers.push_back(ColumnOf(column, slots));
    return numbers;
  }

  // A new array (shape..., width of the column), its memory and its place in a lookup.
  void MakeColumn(const Shape& shape, int column, const RowSchema& schema, nb::list* arrays,
                  std::vector<std::unique_ptr<ArrayView>>* views, std::vector<ColumnOut>* outs) const {
    const int64_t width = WidthOf(column, schema.slots);
    const nb::object array = OutputArray(nb::none(), WithWidth(shape, width), value_dtype_);
    arrays->append(array);
    views->push_back(std::make_unique<ArrayView>("out", array, value_dtype_, true));
    outs->push_back({column, views->back()->data(), width, schema.generation});
  }

 private:
  // What a batch evicts, until there is the GIL to make arrays with.
  struct Evicted : EvictedRows {
    Evicted(int64_t value, int64_t key) : value_bytes(value), key_bytes(key) {}
    void Allocate(int64_t count, void** keys_out, void** values_out) override {
      keys.resize(static_cast<size_t>(count * key_bytes));
      values.resize(static_cast<size_t>(count * value_bytes));
      n = count;
      *keys_out = keys.data();
      *values_out = values.data();
    }
    const int64_t value_bytes;
    const int64_t key_bytes;
    int64_t n = 0;
    std::vector<char> keys;
    std::vector<char> values;
  };

  static uint64_t* PositionsOf(const std::unique_ptr<ArrayView>& positions) {
    return positions ? static_cast<uint64_t*>(positions->data()) : nullptr;
  }

  int64_t dim() const { return table_->dim(); }

  static int ColumnOf(nb::handle column, const std::vector<SlotSpec>& slots) {
    if (nb::isinstance<nb::str>(column)) {
      const std::string name = TextOf(column);
      for (size_t i = 0; i < slots.size(); ++i) {
        if (slots[i].name == name) return static_cast<int>(i) + 1;
      }
      if (name == "value") return 0;
      std::string have = "'value'";
      for (const SlotSpec& slot : slots) have += ", '" + slot.name + "'";
      ThrowValue("The table has no column '" + name + "'; it has " + have + ".");
    }
    const int number = nb::cast<int>(column);
    WidthOf(number, slots, 1);
    return number;
  }

  int64_t WidthOf(int column, const std::vector<SlotSpec>& slots) const {
    return WidthOf(column, slots, dim());
  }
  static int64_t WidthOf(int column, const std::vector<SlotSpec>& slots, int64_t dim) {
    if (column < 0 || column > static_cast<int>(slots.size())) {
      ThrowValue("The table has no column " + std::to_string(column) + "; it has the value, 0, and " +
                 std::to_string(slots.size()) + " slots.");
    }
    return column == 0 ? dim : slots[static_cast<size_t>(column) - 1].width;
  }

  std::vector<ColumnIn> InputColumns(const Shape& shape, const nb::dict& columns,
                                     std::vector<std::unique_ptr<ArrayView>>* views) const {
    const RowSchema schema = table_->schema();
    std::vector<ColumnIn> in;
    for (auto [name, array] : columns) {
      const int column = ColumnOf(name, schema.slots);
      const int64_t width = WidthOf(column, schema.slots);
      views->push_back(std::make_unique<ArrayView>("A column", array, value_dtype_, false));
      views->back()->ExpectShape("A column", WithWidth(shape, width));
      in.push_back({column, views->back()->data(), width, schema.generation});
    }
    return in;
  }

  // Null for None.
  static std::unique_ptr<ArrayView> Optional(const char* what, nb::handle array, const nb::object& dtype,
                                             bool writable, const Shape& shape) {
    if (array.is_none()) return nullptr;
    auto view = std::make_unique<ArrayView>(what, array, dtype, writable);
    view->ExpectShape(what, shape);
    return view;
  }

  nb::object key_dtype_;
  nb::object value_dtype_;
  nb::object bool_dtype_;
  nb::object uint32_dtype_;
  nb::object uint64_dtype_;
  std::unique_ptr<Table> table_;
  std::shared_ptr<ParallelFor> pool_;
};

PyExporter::PyExporter(std::shared_ptr<PyTable> table, const nb::object& columns, int64_t chunk, bool scores)
    : table_(std::move(table)),
      schema_(table_->table().schema()),
      columns_(PyTable::ColumnsOf(columns, schema_)),
      chunk_(chunk),
      scores_(scores) {
  if (chunk <= 0) ThrowValue("chunk is " + std::to_string(chunk) + "; expected at least 1.");
  exporter_ = table_->table().Export();
}

nb::tuple PyExporter::Next() {
  const int64_t n = std::min(chunk_, exporter_->max_rows());
  const Shape shape = {n};
  const nb::object keys = OutputArray(nb::none(), shape, table_->key_dtype());
  const nb::object freqs = OutputArray(nb::none(), shape, table_->uint32_dtype());
  const nb::object versions = OutputArray(nb::none(), shape, table_->uint32_dtype());
  const nb::object scores = OutputArray(nb::none(), {scores_ ? n : 0}, table_->uint64_dtype());
  nb::list arrays;
  int64_t rows = 0;
  {
    const ArrayView k("keys", keys, table_->key_dtype(), true);
    const ArrayView f("frequencies", freqs, table_->uint32_dtype(), true);
    const ArrayView v("versions", versions, table_->uint32_dtype(), true);
    std::vector<std::unique_ptr<ArrayView>> views;
    Exporter::Buffers buffers;
    buffers.keys = k.data();
    buffers.freqs = static_cast<uint32_t*>(f.data());
    buffers.versions = static_cast<uint32_t*>(v.data());
    const ArrayView s("scores", scores, table_->uint64_dtype(), true);
    if (scores_) buffers.scores = static_cast<uint64_t*>(s.data());
    for (int column : columns_) table_->MakeColumn(shape, column, schema_, &arrays, &views, &buffers.columns);
    nb::gil_scoped_release unlocked;
    rows = exporter_->Next(n, buffers, table_->pool());
  }
  if (rows == 0) throw nb::stop_iteration();
  const nb::object head = nb::module_::import_("builtins").attr("slice")(rows);
  nb::dict columns;
  for (size_t i = 0; i < columns_.size(); ++i) {
    columns[nb::int_(columns_[i])] = arrays[i][head];
  }
  if (scores_) return nb::make_tuple(keys[head], freqs[head], versions[head], columns, scores[head]);
  return nb::make_tuple(keys[head], freqs[head], versions[head], columns);
}

nb::dict OptimizersDict() {
  nb::dict all;
  for (const OptimizerSpec& spec : Optimizers()) {
    nb::dict hyperparameters;
    for (const Hyperparameter& h : spec.hyperparameters) {
      const nb::object fallback = std::isnan(h.fallback) ? nb::none() : nb::object(nb::float_(h.fallback));
      hyperparameters[h.name] = nb::make_tuple(fallback, Describe(h.range));
    }
    nb::dict slots;
    for (const OptimizerSlot& slot : spec.slots) slots[slot.name] = slot.initial;
    nb::dict one;
    one["hyperparameters"] = hyperparameters;
    one["slots"] = slots;
    all[spec.name] = one;
  }
  return all;
}

nb::tuple ApplyToNumPyArrays(const std::string& optimizer, const std::vector<nb::object>& columns,
                             nb::handle gradients, const nb::dict& hyperparameters, const nb::object& rows,
                             bool stochastic_rounding, uint64_t seed, bool skip_nonfinite) {
  Update update = UpdateOf(optimizer, hyperparameters);
  update.stochastic_rounding = stochastic_rounding;
  update.seed = seed;
  update.skip_nonfinite = skip_nonfinite;
  std::string names = "value";
  for (const OptimizerSlot& slot : update.optimizer->slots) names += std::string(", ") + slot.name;
  if (columns.size() != 1 + update.optimizer->slots.size()) {
    ThrowValue("columns has " + std::to_string(columns.size()) + " arrays; optimizer " + optimizer +
               " expects " + std::to_string(1 + update.optimizer->slots.size()) + ": " + names + ".");
  }
  if (!nb::hasattr(columns[0], "dtype")) ThrowType("columns[0] is not a NumPy array.");
  const std::string name = NameOfDtype(columns[0].attr("dtype"));
  const ValueType type = ValueTypeOf(name);
  const nb::object dtype = DtypeNamed(name);
  std::vector<std::unique_ptr<ArrayView>> views;
  std::vector<void*> data;
  for (size_t c = 0; c < columns.size(); ++c) {
    const std::string what = "columns[" + std::to_string(c) + "]";
    views.push_back(std::make_unique<ArrayView>(what.c_str(), columns[c], dtype, true));
    if (c == 0 && (views[0]->shape().size() != 2 || views[0]->shape()[1] == 0)) {
      ThrowValue("columns[0] has shape " + TextOf(views[0]->shape()) + "; expected (rows, dim).");
    }
    views[c]->ExpectShape(what.c_str(), views[0]->shape());
    data.push_back(views[c]->data());
  }
  const int64_t num_rows = views[0]->shape()[0];
  const int64_t dim = views[0]->shape()[1];
  std::optional<ArrayView> r;
  if (!rows.is_none()) {
    r.emplace("rows", rows, DtypeNamed("int64"), false);
    r->ExpectShape("rows", {r->size()});
    std::vector<bool> seen(static_cast<size_t>(num_rows));
    for (int64_t i = 0; i < r->size(); ++i) {
      const int64_t row = static_cast<const int64_t*>(r->data())[i];
      if (row < 0 || row >= num_rows) {
        ThrowValue("rows has " + std::to_string(row) + "; expected 0 to " + std::to_string(num_rows - 1) +
                   ".");
      }
      if (seen[static_cast<size_t>(row)]) {
        ThrowValue("rows has " + std::to_string(row) + " twice; sum the gradients of equal rows first.");
      }
      seen[static_cast<size_t>(row)] = true;
    }
  }
  const int64_t n = r ? r->size() : num_rows;
  const ArrayView g("gradients", gradients, dtype, false);
  g.ExpectShape("gradients", {n, dim});
  const std::shared_ptr<ParallelFor> pool = PoolOf(0);
  ApplyCounts counts;
  {
    nb::gil_scoped_release unlocked;
    counts = ApplyToArrays(update, type, dim, data, r ? static_cast<const int64_t*>(r->data()) : nullptr, n,
                           g.data(), *pool);
  }
  return nb::make_tuple(counts.updated, counts.skipped);
}

nb::object InitialValues(nb::handle keys, nb::handle value_dtype, int64_t dim, nb::handle initializer) {
  const nb::object dtype = nb::borrow(keys).attr("dtype");
  PyTable table(dtype, value_dtype, dim, initializer, nb::list(), 0, 0, "lru", 1, false, 1);
  return table.Gather(keys, nb::str("initial"), nb::none(), nb::none(), nb::none());
}

constexpr const char* kInitializerDoc = R"(``initializer`` is None (zeros), a number, or a dict::

    {"kind": "constant", "value": 0.0}
    {"kind": "uniform", "low": 0.0, "high": 1.0, "seed": 0}
    {"kind": "normal", "mean": 0.0, "stddev": 1.0, "seed": 0}
    {"kind": "truncated_normal", "mean": 0.0, "stddev": 1.0, "seed": 0}
    {"kind": "rows", "rows": array}    # (rows, dim): key k takes row hash_key(k) mod rows
)";

NB_MODULE(_kvtable, m) {
  m.doc() = "The table engine: a concurrent map from integer keys to embedding rows with optimizer slots.";

  nb::register_exception_translator(TranslateError);

  static const std::string table_doc =
      std::string(R"(A map from integer keys to rows, each a value and its optimizer slots.

Safe from any number of threads; every operation takes a batch and releases the GIL. Arrays must be C-contiguous and of
exactly the table's dtypes; keys may have any shape, and rows then have shape (*keys.shape, dim).

Args:
    key_dtype: int64, int32 or uint64. Every key value is legal.
    value_dtype: float32, float16, bfloat16 (ml_dtypes) or float64.
    dim: elements of a value.
    initializer: what a new key's value is: a pure function of seed, key and column. See below.
    slots: a sequence of (name, width, "constant" | "copy_value", constant); the last two may be left out.
    capacity_hint: rows to make room for at once. The table grows by itself.
    max_capacity: the most rows that a batch leaves behind: those with the lowest score are evicted, but not those of
        the batch itself, unless it has more keys than that. 0: no bound.
    eviction: what a row's score is: "lru", the time of its last touch (microseconds since 1970); "lfu", how often it was
        touched, then when (count << 32 | seconds); "custom", what set_scores said; "epoch_lru" and "epoch_lfu", in
        which epoch (set_epoch) it was last touched, then when, or how often (epoch << 32 | seconds or count).
    shards: a power of two up to 64; 0 takes four per CPU, at least 8.
    huge_pages: ask the system for 2 MiB pages.
    threads: threads for large batches; 0 takes one per CPU.

Raises:
    ValueError, TypeError: for arguments that cannot be.
    MemoryError: where the system refuses memory.

)") + kInitializerDoc +
      R"(
Example:
    >>> import numpy as np
    >>> from kvtools._kvtable import Table
    >>> table = Table("int64", "float32", 2, initializer=0.5)
    >>> table.gather_or_insert(np.array([7, -1]))
    array([[0.5, 0.5],
           [0.5, 0.5]], dtype=float32)
    >>> len(table)
    2
)";
  nb::class_<PyTable>(m, "Table", table_doc.c_str())
      .def(nb::init<nb::handle, nb::handle, int64_t, nb::handle, nb::handle, int64_t, int64_t,
                    const std::string&, int, bool, int>(),
           "key_dtype"_a, "value_dtype"_a, "dim"_a, nb::kw_only(), "initializer"_a = nb::none(),
           "slots"_a = nb::make_tuple(), "capacity_hint"_a = 0, "max_capacity"_a = 0, "eviction"_a = "lru",
           "shards"_a = 0, "huge_pages"_a = true, "threads"_a = 0)
      .def("__len__", [](PyTable& t) { return t.table().Size(); })
      .def_prop_ro(
          "key_dtype", [](PyTable& t) { return t.key_dtype(); }, "The keys' NumPy dtype.")
      .def_prop_ro(
          "value_dtype", [](PyTable& t) { return t.value_dtype(); }, "The values' NumPy dtype.")
      .def_prop_ro(
          "dim", [](PyTable& t) { return t.table().dim(); }, "Elements of a value.")
      .def_prop_rw("initializer", &PyTable::GetInitializer, &PyTable::SetInitializer,
                   nb::for_getter(nb::sig("def initializer(self, /) -> dict")),
                   "The initializer as a dict. Setting it replaces the initial values of rows not yet there.")
      .def_prop_ro("slots", &PyTable::GetSlots, "A list of (name, width, init, constant).")
      .def_prop_ro(
          "max_capacity", [](PyTable& t) { return t.table().max_capacity(); },
          "The most rows that a batch leaves behind; 0 where there is no bound.")
      .def_prop_ro(
          "eviction", [](PyTable& t) { return NameOf(t.table().eviction()); },
          "What a row's score is: \"lru\", \"lfu\", \"custom\", \"epoch_lru\" or \"epoch_lfu\".")
      .def_prop_ro(
          "evicted_rows", [](PyTable& t) { return t.table().EvictedCount(); },
          "How many rows were evicted so far.")
      .def_prop_ro(
          "generation", [](PyTable& t) { return t.table().generation(); },
          "A number that changes whenever the layout of rows does.")
      .def("gather", &PyTable::Gather, "keys"_a, "missing"_a = "zeros", nb::kw_only(), "out"_a = nb::none(),
           "found"_a = nb::none(), "positions"_a = nb::none(), R"(Look keys up without changing the table.

Args:
    keys: (...) of key_dtype.
    missing: what an absent key gives: "zeros", "initial", or an array (dim,) or (rows, dim), of which key i takes
        row i mod rows.
    out: (..., dim) of value_dtype to write to, instead of a new array.
    found: (...) of bool to write to: whether each key was there.
    positions: (...) of uint64 to write to: where each key's row lies, shard << 32 | row, or 2**64 - 1 where it has
        none. It stays so until the key is removed.

Returns:
    (..., dim) of value_dtype.

Example:
    >>> table = Table("int64", "float32", 2)
    >>> table.gather(np.array([1]))
    array([[0., 0.]], dtype=float32)
)")
      .def("gather_or_insert", &PyTable::GatherOrInsert, "keys"_a, nb::kw_only(), "frequency"_a = 0,
           "version"_a = 0, "admission"_a = 1.0, "seed"_a = 0, "out"_a = nb::none(),
           "inserted"_a = nb::none(), "positions"_a = nb::none(),
           R"(Look keys up; insert absent ones with their initial value.

Args:
    keys: (...) of key_dtype.
    frequency: what each occurrence of a new key adds to its frequency.
    version: the version of new rows.
    admission: the probability that an absent key is inserted; one that is not gives zeros.
    seed: of the admission, which is a function of seed and key: give each call another.
    out: (..., dim) of value_dtype to write to, instead of a new array.
    inserted: (...) of bool to write to: true for each occurrence of a key that was new.
    positions: (...) of uint64 to write to: where each key's row lies, shard << 32 | row; 2**64 - 1 for a key that was
        not admitted. In a bounded table the row may be evicted at once, where the batch has more keys than the capacity.

Returns:
    (..., dim) of value_dtype.

Example:
    >>> table = Table("int64", "float32", 1, initializer=3.0)
    >>> table.gather_or_insert(np.array([5, 5]))
    array([[3.],
           [3.]], dtype=float32)
)")
      .def("gather_or_insert_evicting", &PyTable::GatherOrInsertEvicting, "keys"_a, nb::kw_only(),
           "frequency"_a = 0, "version"_a = 0, "admission"_a = 1.0, "seed"_a = 0, "out"_a = nb::none(),
           "inserted"_a = nb::none(), "positions"_a = nb::none(),
           R"(As gather_or_insert, and give back what the batch evicts.

Args:
    keys, frequency, version, admission, seed, out, inserted, positions: as for gather_or_insert.

Returns:
    (..., dim) of value_dtype; the evicted keys (n,), lowest score first, and their values (n, dim).

Example:
    >>> table = Table("int64", "float32", 1, initializer=3.0, max_capacity=1)
    >>> _ = table.gather_or_insert(np.array([5]))
    >>> table.gather_or_insert_evicting(np.array([6]))
    (array([[3.]], dtype=float32), array([5]), array([[3.]], dtype=float32))
)")
      .def("scores", &PyTable::Scores, "keys"_a, R"(The score of each key's row.

Args:
    keys: (...) of key_dtype.

Returns:
    (...) of uint64; zeros for absent keys, and in a table without a bound.

Example:
    >>> Table("int64", "float32", 1, max_capacity=9).scores(np.array([5]))
    array([0], dtype=uint64)
)")
      .def("set_scores", &PyTable::SetScores, "keys"_a, "scores"_a,
           R"(Set the scores that "custom" eviction goes by.

Args:
    keys: (...) of key_dtype; absent ones are ignored, and of equal ones the last wins.
    scores: (...) of uint64.

Returns:
    How many of the keys are there.

Raises:
    RuntimeError: the table is not bounded, or makes its scores itself.

Example:
    >>> table = Table("int64", "float32", 1, max_capacity=2, eviction="custom")
    >>> _ = table.gather_or_insert(np.array([5, 6]))
    >>> table.set_scores(np.array([5, 9]), np.array([7, 7], np.uint64))
    1
    >>> _ = table.gather_or_insert(np.array([8]))
    >>> table.contains(np.array([5, 6, 8]))
    array([ True, False,  True])
)")
      .def(
          "set_epoch",
          [](PyTable& t, uint32_t epoch) {
            nb::gil_scoped_release unlocked;
            t.table().SetEpoch(epoch);
          },
          "epoch"_a,
          R"(Set the epoch of the touches to come: rows last touched in a lower one are evicted first.

Args:
    epoch: 0 to 2**32 - 1, which should only rise; 0 until this is called.

Raises:
    RuntimeError: the table is not bounded, or has no epochs.

Example:
    >>> table = Table("int64", "float32", 1, max_capacity=2, eviction="epoch_lfu")
    >>> _ = table.gather_or_insert(np.array([5, 5]))
    >>> table.set_epoch(1)
    >>> _ = table.gather_or_insert(np.array([6]))
    >>> _ = table.gather_or_insert(np.array([7]))
    >>> table.contains(np.array([5, 6, 7]))
    array([False,  True,  True])
)")
      .def("gather_columns", &PyTable::GatherColumns, "keys"_a, "columns"_a = nb::none(), nb::kw_only(),
           "found"_a = nb::none(), R"(Look up several columns at once without changing the table.

Args:
    keys: (...) of key_dtype.
    columns: column numbers (0 is the value, i + 1 is slot i) or names ("value", a slot's name); None takes all.
    found: (...) of bool to write to: whether each key was there.

Returns:
    A list of arrays (..., width), in the order of `columns`. An absent key gives initial values.

Example:
    >>> table = Table("int64", "float32", 1, slots=[("m", 2, "constant", 1.0)])
    >>> table.gather_columns(np.array([5]), ["m"])
    [array([[1., 1.]], dtype=float32)]
)")
      .def("contains", &PyTable::Contains, "keys"_a, nb::kw_only(), "out"_a = nb::none(),
           R"(Which keys are there.

Args:
    keys: (...) of key_dtype.
    out: (...) of bool to write to, instead of a new array.

Returns:
    (...) of bool.

Example:
    >>> Table("int64", "float32", 1).contains(np.array([5]))
    array([False])
)")
      .def("gather_stamps", &PyTable::GatherStamps, "keys"_a,
           R"(The frequency and version of each key; zeros where absent.

Args:
    keys: (...) of key_dtype.

Returns:
    Two arrays (...) of uint32: frequencies, versions.

Example:
    >>> table = Table("int64", "float32", 1)
    >>> _ = table.gather_or_insert(np.array([5, 5]), frequency=1, version=9)
    >>> table.gather_stamps(np.array([5, 6]))
    (array([2, 0], dtype=uint32), array([9, 0], dtype=uint32))
)")
      .def("upsert", &PyTable::Upsert, "keys"_a, "values"_a, nb::kw_only(), "frequency"_a = 0,
           "version"_a = 0,
           R"(Write values; the last of equal keys wins. A new row's slots get their initial contents.

Args:
    keys: (...) of key_dtype.
    values: (..., dim) of value_dtype.
    frequency: what each occurrence adds to its row's frequency.
    version: what becomes the rows' version.

Example:
    >>> table = Table("int64", "float32", 1)
    >>> table.upsert(np.array([5]), np.array([[2.0]], np.float32))
    >>> table.gather(np.array([5]))
    array([[2.]], dtype=float32)
)")
      .def("upsert_columns", &PyTable::UpsertColumns, "keys"_a, "columns"_a, nb::kw_only(), "frequency"_a = 0,
           "version"_a = 0, R"(Write some columns; the others of a new row get their initial contents.

Args:
    keys: (...) of key_dtype.
    columns: a dict from column number or name to an array (..., width) of value_dtype.
    frequency: what each occurrence adds to its row's frequency.
    version: what becomes the rows' version.

Example:
    >>> table = Table("int64", "float32", 1, slots=[("m", 1)])
    >>> table.upsert_columns(np.array([5]), {"m": np.array([[2.0]], np.float32)})
    >>> table.gather_columns(np.array([5]))
    [array([[0.]], dtype=float32), array([[2.]], dtype=float32)]
)")
      .def("accumulate", &PyTable::Accumulate, "keys"_a, "deltas"_a, nb::kw_only(), "from_zeros"_a = false,
           "frequency"_a = 0, "version"_a = 0, R"(Add to values; equal keys add up in the order of the batch.

Args:
    keys: (...) of key_dtype.
    deltas: (..., dim) of value_dtype.
    from_zeros: an absent key starts from zeros instead of its initial value.
    frequency: what each occurrence adds to its row's frequency.
    version: what becomes the rows' version.

Example:
    >>> table = Table("int64", "float32", 1)
    >>> table.accumulate(np.array([5, 5]), np.array([[2.0], [3.0]], np.float32))
    >>> table.gather(np.array([5]))
    array([[5.]], dtype=float32)
)")
      .def("apply", &PyTable::Apply, "optimizer"_a, "keys"_a, "gradients"_a, "hyperparameters"_a,
           nb::kw_only(), "slots"_a = std::vector<nb::object>(), "positions"_a = nb::none(),
           "stochastic_rounding"_a = false, "seed"_a = 0, "skip_nonfinite"_a = false, "frequency"_a = 1,
           "version"_a = 0, R"(One training step: update value and slots of each distinct key in place.

Gradients of equal keys are summed first. An absent key is inserted with its initial value first.

Args:
    optimizer: one of optimizers().
    keys: (...) of key_dtype.
    gradients: (..., dim) of value_dtype.
    hyperparameters: a dict from name to number; those with a fallback may be left out.
    slots: the columns (numbers or names) of the optimizer's slots, in its order.
    positions: (...) of uint64, what a lookup remembered, or None.
    stochastic_rounding: round 16-bit columns up or down at random, without bias.
    seed: of the rounding; give each step another.
    skip_nonfinite: leave rows alone whose summed gradient has a NaN or an infinity.
    frequency: what each step adds to its rows' frequency.
    version: what becomes the rows' version.

Returns:
    How many rows were updated, and how many were skipped.

Raises:
    ValueError: an optimizer, hyperparameter or shape that does not fit; RuntimeError: a slot that is not as wide as the
        value. Nothing is changed then.

Example:
    >>> table = Table("int64", "float32", 1)
    >>> table.apply("sgd", np.array([5, 5]), np.array([[1.0], [2.0]], np.float32), {"learning_rate": 0.5})
    (1, 0)
    >>> table.gather(np.array([5]))
    array([[-1.5]], dtype=float32)
)")
      .def("zeroed", &PyTable::Zeroed, "keys"_a,
           R"(Which rows an optimizer's penalty has zeroed, or an import brought as zeros.

Args:
    keys: (...) of key_dtype.

Returns:
    (...) of bool; False for absent keys.

Example:
    >>> Table("int64", "float32", 1).zeroed(np.array([5]))
    array([False])
)")
      .def_prop_ro(
          "zeroed_rows", [](PyTable& t) { return t.table().ZeroedRows(); },
          "How many rows `zeroed` is true for.")
      .def_prop_ro(
          "skipped_updates", [](PyTable& t) { return t.table().SkippedUpdates(); },
          "Row updates left out so far because of gradients that are not finite.")
      .def("remove", &PyTable::Remove, "keys"_a, R"(Remove keys; absent ones are ignored.

Args:
    keys: (...) of key_dtype.

Returns:
    How many rows were there and are gone.

Example:
    >>> Table("int64", "float32", 1).remove(np.array([5]))
    0
)")
      .def(
          "clear",
          [](PyTable& t) {
            nb::gil_scoped_release unlocked;
            t.table().Clear();
          },
          "Remove every row and give the memory back.")
      .def(
          "reserve",
          [](PyTable& t, int64_t rows) {
            nb::gil_scoped_release unlocked;
            t.table().Reserve(rows, t.pool());
          },
          "rows"_a, "Make room for this many rows in all, so that inserting them rebuilds nothing.")
      .def("ensure_slots", &PyTable::EnsureSlots, "slots"_a, R"(Make the slots exactly these, in this order.

A slot of the same name and width keeps its contents, a new one starts from its initial contents, others are dropped.

Args:
    slots: as for the constructor.

Returns:
    The new generation; the present one where nothing changes.

Example:
    >>> table = Table("int64", "float32", 1)
    >>> table.ensure_slots([("m", 1, "constant", 0.1)])
    2
)")
      .def(
          "export",
          [](const std::shared_ptr<PyTable>& t, const nb::object& columns, int64_t chunk, bool scores) {
            return std::make_shared<PyExporter>(t, columns, chunk, scores);
          },
          "columns"_a = nb::none(), nb::kw_only(), "chunk"_a = 65536, "scores"_a = false,
          R"(Iterate over all rows in chunks.

Rows inserted meanwhile may be left out; every other row comes once, and whole.

Args:
    columns: column numbers or names, as the slots are when the export begins; None takes all.
    chunk: rows at a time, at most.
    scores: give the rows' scores, too; zeros in a table without a bound.

Returns:
    An iterator of (keys (n,), frequencies (n,), versions (n,), {column number: (n, width)}), and scores (n,) of uint64
    where asked for.

Raises:
    RuntimeError: a slot that is asked for went away, or changed its place, since the export began.

Example:
    >>> table = Table("int64", "float32", 1)
    >>> table.upsert(np.array([5]), np.array([[2.0]], np.float32))
    >>> list(table.export())
    [(array([5]), array([0], dtype=uint32), array([0], dtype=uint32), {0: array([[2.]], dtype=float32)})]
)")
      .def("import_rows", &PyTable::Import, "keys"_a, "columns"_a, nb::kw_only(),
           "frequencies"_a = nb::none(), "versions"_a = nb::none(), "scores"_a = nb::none(),
           R"(Upsert rows with their stamps, as an export gave them.

Args:
    keys: (...) of key_dtype.
    columns: a dict from column number or name to an array (..., width) of value_dtype.
    frequencies, versions: (...) of uint32; None: zeros.
    scores: (...) of uint64, for a bounded table; None: "lru" starts from the versions as seconds, "lfu" from the
        frequencies. What is too much goes by score, the rows of the batch like the others.

Example:
    >>> table = Table("int64", "float32", 1)
    >>> table.import_rows(np.array([5]), {0: np.array([[2.0]], np.float32)}, versions=np.array([3], np.uint32))
)")
      .def("memory", &PyTable::Memory,
           "A dict of rows, row_bytes, index_bytes, column_bytes, slack_bytes and overhead_per_row (bytes).")
      .def(
          "max_probe_length",
          [](PyTable& t) {
            nb::gil_scoped_release unlocked;
            return t.table().MaxProbeLength();
          },
          "The most cache lines of the index that the lookup of a present key reads. Scans the index.");

  nb::class_<PyExporter>(m, "Exporter", "An iterator over a table's rows, in chunks. Made by Table.export.")
      .def("__iter__", [](nb::object self) { return self; })
      .def("__next__", &PyExporter::Next)
      .def_prop_ro("max_rows", &PyExporter::max_rows, "At least the number of rows still to come.");

  m.def(
      "hash_key", [](uint64_t key) { return HashKey(key); }, "key"_a,
      R"(The 64-bit hash that places a key, given as its 64 bits (a negative key plus 2**64).

Example:
    >>> hash_key(0)
    0
)");
  static const std::string initial_values_doc = std::string(R"(The values that new keys would get in a table.

Args:
    keys: (...) of int64, int32 or uint64.
    value_dtype, dim, initializer: as for Table.

Returns:
    (..., dim) of value_dtype.

)") + kInitializerDoc + R"(
Example:
    >>> initial_values(np.array([1]), "float32", 2, 0.5)
    array([[0.5, 0.5]], dtype=float32)
)";
  m.def("initial_values", &InitialValues, "keys"_a, "value_dtype"_a, "dim"_a, "initializer"_a = nb::none(),
        initial_values_doc.c_str());

  m.def("optimizers", &OptimizersDict, R"(The update rules there are: formulas in docs/optimizer-rules.md.

Returns:
    A dict from name to {"hyperparameters": {name: (fallback, range)}, "slots": {name: initial}}. A fallback of None
    means that the hyperparameter has to be given; initial is what a slot usually starts from.

Example:
    >>> optimizers()["sgd"]["hyperparameters"]
    {'learning_rate': (None, 'a finite number'), 'weight_decay': (0.0, '0 or more')}
    >>> optimizers()["adagrad"]["slots"]
    {'accumulator': 0.1}
)");
  m.def("apply_to_arrays", &ApplyToNumPyArrays, "optimizer"_a, "columns"_a, "gradients"_a,
        "hyperparameters"_a, nb::kw_only(), "rows"_a = nb::none(), "stochastic_rounding"_a = false,
        "seed"_a = 0, "skip_nonfinite"_a = false, R"(One step of an optimizer over rows of arrays, in place.

Args:
    optimizer: one of optimizers().
    columns: value and slots in the optimizer's order, each (rows, dim) of float32, float16, bfloat16 or float64, all of
        one dtype, and none the memory of another.
    gradients: (n, dim) of that dtype.
    hyperparameters: a dict from name to number; those with a fallback may be left out.
    rows: (n,) of int64, which row each gradient is for, each once at most; None: every row, in order.
    stochastic_rounding: round 16-bit columns up or down at random, without bias.
    seed: of the rounding, which is a function of seed, row and column; give each step another.
    skip_nonfinite: leave rows alone whose gradient has a NaN or an infinity.

Returns:
    How many rows were updated, and how many were skipped.

Raises:
    ValueError, TypeError: what does not fit, by name; nothing is changed then.

Example:
    >>> value, accumulator = np.zeros((2, 1), np.float32), np.zeros((2, 1), np.float32)
    >>> apply_to_arrays("momentum", [value, accumulator], np.array([[2.0]], np.float32), {"learning_rate": 0.5},
    ...                 rows=np.array([1]))
    (1, 0)
    >>> value
    array([[ 0.],
           [-1.]], dtype=float32)
)");
}

}  // namespace
}  // namespace kvtable
