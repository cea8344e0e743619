#include "table_class.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "admission_arguments.h"
#include "kvtable/optimizer.h"
#include "thread_pools.h"

namespace kvtable {

PyTable::PyTable(nb::handle key_dtype, nb::handle value_dtype, int64_t dim, nb::handle initializer,
                 nb::handle slots, int64_t capacity_hint, int64_t max_capacity, const std::string& eviction,
                 int shards, bool huge_pages, int threads, int64_t max_age, const std::string& age_unit,
                 nb::handle clock, nb::handle admission, nb::handle padding_key, int64_t max_memory,
                 const std::string& spill, const std::string& name)
    : key_dtype_(DtypeNamed(NameOfDtype(key_dtype))),
      value_dtype_(DtypeNamed(NameOfDtype(value_dtype))),
      bool_dtype_(DtypeNamed("bool")),
      uint32_dtype_(DtypeNamed("uint32")),
      uint64_dtype_(DtypeNamed("uint64")),
      admission_(AdmissionOf(admission)) {
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
  options.expiry = ExpiryOf(max_age, age_unit, clock);
  options.clock = options.expiry.clock;
  options.padding_key = PaddingKeyOf(padding_key, options.key_type);
  options.max_memory = max_memory;
  options.spill = spill;
  options.name = name;
  table_ = Table::Create(options);
  table_->set_admitter(Admitter::Create(admission_));
  pool_ = PoolOf(threads);
}

nb::object PyTable::Gather(nb::handle keys, nb::handle missing, nb::object out, nb::object found,
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
      ThrowValue("missing is '" + name + "'; expected 'zeros', 'initial' or an array (dim,) or (rows, dim).");
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

nb::object PyTable::GatherOrInsert(nb::handle keys, uint32_t frequency, uint32_t version, double admission,
                                   uint64_t seed, nb::object out, nb::object inserted, nb::object positions) {
  return Insert(keys, {{frequency, version}, nullptr, admission, seed, nullptr}, out, inserted, positions);
}

nb::tuple PyTable::GatherOrInsertEvicting(nb::handle keys, uint32_t frequency, uint32_t version,
                                          double admission, uint64_t seed, nb::object out,
                                          nb::object inserted, nb::object positions) {
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

nb::object PyTable::Insert(nb::handle keys, Insertion insertion, nb::object out, const nb::object& inserted,
                           const nb::object& positions) {
  const ArrayView k("keys", keys, key_dtype_, false);
  out = OutputArray(out, WithWidth(k.shape(), dim()), value_dtype_);
  const ArrayView o("out", out, value_dtype_, true);
  o.ExpectShape("out", WithWidth(k.shape(), dim()));
  const std::unique_ptr<ArrayView> f = Optional("inserted", inserted, bool_dtype_, true, k.shape());
  const std::unique_ptr<ArrayView> p = Optional("positions", positions, uint64_dtype_, true, k.shape());
  {
    nb::gil_scoped_release unlocked;
    if (!admission_.admits_all()) {
      insertion.admitter = table_->admitter().get();
      insertion.below = admission_.below;
      if (insertion.admission == 1.0) insertion.admission = admission_.probability;
    }
    insertion.inserted = f ? static_cast<bool*>(f->data()) : nullptr;
    table_->GatherOrInsert(k.data(), k.size(), {o.data(), PositionsOf(p)}, insertion, *pool_);
  }
  return out;
}

nb::list PyTable::GatherColumns(nb::handle keys, const nb::object& columns, const nb::object& found) {
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

nb::object PyTable::Contains(nb::handle keys, nb::object out) {
  const ArrayView k("keys", keys, key_dtype_, false);
  out = OutputArray(out, k.shape(), bool_dtype_);
  const ArrayView o("out", out, bool_dtype_, true);
  o.ExpectShape("out", k.shape());
  nb::gil_scoped_release unlocked;
  table_->Contains(k.data(), k.size(), static_cast<bool*>(o.data()), *pool_);
  return out;
}

nb::tuple PyTable::GatherStamps(nb::handle keys) {
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

void PyTable::Upsert(nb::handle keys, nb::handle values, uint32_t frequency, uint32_t version) {
  const ArrayView k("keys", keys, key_dtype_, false);
  const ArrayView v("values", values, value_dtype_, false);
  v.ExpectShape("values", WithWidth(k.shape(), dim()));
  nb::gil_scoped_release unlocked;
  table_->Upsert(k.data(), k.size(), v.data(), {frequency, version}, *pool_);
}

void PyTable::UpsertColumns(nb::handle keys, const nb::dict& columns, uint32_t frequency, uint32_t version) {
  const ArrayView k("keys", keys, key_dtype_, false);
  std::vector<std::unique_ptr<ArrayView>> views;
  const std::vector<ColumnIn> in = InputColumns(k.shape(), columns, &views);
  nb::gil_scoped_release unlocked;
  table_->UpsertColumns(k.data(), k.size(), in, {frequency, version}, *pool_);
}

void PyTable::Accumulate(nb::handle keys, nb::handle deltas, bool from_zeros, uint32_t frequency,
                         uint32_t version) {
  const ArrayView k("keys", keys, key_dtype_, false);
  const ArrayView d("deltas", deltas, value_dtype_, false);
  d.ExpectShape("deltas", WithWidth(k.shape(), dim()));
  nb::gil_scoped_release unlocked;
  table_->Accumulate(k.data(), k.size(), d.data(), from_zeros, {frequency, version}, *pool_);
}

nb::tuple PyTable::Apply(const std::string& optimizer, nb::handle keys, nb::handle gradients,
                         const nb::dict& hyperparameters, const std::vector<nb::object>& slots,
                         const nb::object& positions, bool stochastic_rounding, uint64_t seed,
                         bool skip_nonfinite, uint32_t frequency, uint32_t version) {
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
  Stamp stamp{frequency, version};
  stamp.existing_only = !admission_.admits_all();
  ApplyCounts counts;
  {
    nb::gil_scoped_release unlocked;
    counts = table_->Apply(k.data(), p ? static_cast<const uint64_t*>(p->data()) : nullptr, k.size(),
                           g.data(), update, columns, stamp, *pool_);
  }
  return nb::make_tuple(counts.updated, counts.skipped);
}

nb::object PyTable::Zeroed(nb::handle keys) {
  const ArrayView k("keys", keys, key_dtype_, false);
  const nb::object out = OutputArray(nb::none(), k.shape(), bool_dtype_);
  const ArrayView o("out", out, bool_dtype_, true);
  nb::gil_scoped_release unlocked;
  table_->Zeroed(k.data(), k.size(), static_cast<bool*>(o.data()), *pool_);
  return out;
}

int64_t PyTable::Remove(nb::handle keys) {
  const ArrayView k("keys", keys, key_dtype_, false);
  nb::gil_scoped_release unlocked;
  return table_->Remove(k.data(), k.size(), *pool_);
}

nb::object PyTable::Scores(nb::handle keys) {
  const ArrayView k("keys", keys, key_dtype_, false);
  const nb::object out = OutputArray(nb::none(), k.shape(), uint64_dtype_);
  const ArrayView o("out", out, uint64_dtype_, true);
  nb::gil_scoped_release unlocked;
  table_->Scores(k.data(), k.size(), static_cast<uint64_t*>(o.data()), *pool_);
  return out;
}

int64_t PyTable::SetScores(nb::handle keys, nb::handle scores) {
  const ArrayView k("keys", keys, key_dtype_, false);
  const ArrayView s("scores", scores, uint64_dtype_, false);
  s.ExpectShape("scores", k.shape());
  nb::gil_scoped_release unlocked;
  return table_->SetScores(k.data(), k.size(), static_cast<const uint64_t*>(s.data()), *pool_);
}

void PyTable::Import(nb::handle keys, const nb::dict& columns, const nb::object& frequencies,
                     const nb::object& versions, const nb::object& scores) {
  const ArrayView k("keys", keys, key_dtype_, false);
  std::vector<std::unique_ptr<ArrayView>> views;
  const std::vector<ColumnIn> in = InputColumns(k.shape(), columns, &views);
  const std::unique_ptr<ArrayView> f = Optional("frequencies", frequencies, uint32_dtype_, false, k.shape());
  const std::unique_ptr<ArrayView> v = Optional("versions", versions, uint32_dtype_, false, k.shape());
  const std::unique_ptr<ArrayView> s = Optional("scores", scores, uint64_dtype_, false, k.shape());
  nb::gil_scoped_release unlocked;
  table_->Import(k.data(), k.size(), in, f ? static_cast<const uint32_t*>(f->data()) : nullptr,
                 v ? static_cast<const uint32_t*>(v->data()) : nullptr,
                 s ? static_cast<const uint64_t*>(s->data()) : nullptr, *pool_);
}

int64_t PyTable::Evict(const std::string& policy, nb::handle number, const std::string& by) {
  const EvictPolicy wanted = PolicyOf(policy, number, by);
  nb::gil_scoped_release unlocked;
  return kvtable::Evict(table_.get(), wanted, *pool_);
}

uint64_t PyTable::EnsureSlots(nb::handle specs) {
  const std::vector<SlotSpec> slots = SlotsOf(specs);
  nb::gil_scoped_release unlocked;
  return table_->EnsureSlots(slots, *pool_);
}

void PyTable::SetInitializer(nb::handle spec) {
  table_->SetInitializer(InitializerOf(spec, table_->value_type(), value_dtype_, dim()));
}

nb::dict PyTable::GetInitializer() const {
  return DictOf(table_->initializer(), table_->value_type(), value_dtype_, table_->dim());
}

nb::dict PyTable::Memory() const {
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
  dict["spilled_rows"] = use.spilled_rows;
  dict["file_bytes"] = use.file_bytes;
  dict["rows_read"] = use.rows_read;
  dict["rows_written"] = use.rows_written;
  dict["overhead_per_row"] = use.overhead_per_row();
  return dict;
}

std::vector<int> PyTable::ColumnsOf(const nb::object& columns, const RowSchema& schema) {
  const std::vector<SlotSpec>& slots = schema.slots;
  std::vector<int> numbers;
  if (columns.is_none()) {
    for (int i = 0; i <= static_cast<int>(slots.size()); ++i) numbers.push_back(i);
    return numbers;
  }
  for (nb::handle column : columns) numbers.push_back(ColumnOf(column, slots));
  return numbers;
}

void PyTable::MakeColumn(const Shape& shape, int column, const RowSchema& schema, nb::list* arrays,
                         std::vector<std::unique_ptr<ArrayView>>* views, std::vector<ColumnOut>* outs) const {
  const int64_t width = WidthOf(column, schema.slots);
  const nb::object array = OutputArray(nb::none(), WithWidth(shape, width), value_dtype_);
  arrays->append(array);
  views->push_back(std::make_unique<ArrayView>("out", array, value_dtype_, true));
  outs->push_back({column, views->back()->data(), width, schema.generation});
}

uint64_t* PyTable::PositionsOf(const std::unique_ptr<ArrayView>& positions) {
  return positions ? static_cast<uint64_t*>(positions->data()) : nullptr;
}

int PyTable::ColumnOf(nb::handle column, const std::vector<SlotSpec>& slots) {
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

int64_t PyTable::WidthOf(int column, const std::vector<SlotSpec>& slots) const {
  return WidthOf(column, slots, dim());
}

int64_t PyTable::WidthOf(int column, const std::vector<SlotSpec>& slots, int64_t dim) {
  if (column < 0 || column > static_cast<int>(slots.size())) {
    ThrowValue("The table has no column " + std::to_string(column) + "; it has the value, 0, and " +
               std::to_string(slots.size()) + " slots.");
  }
  return column == 0 ? dim : slots[static_cast<size_t>(column) - 1].width;
}

std::vector<ColumnIn> PyTable::InputColumns(const Shape& shape, const nb::dict& columns,
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

std::unique_ptr<ArrayView> PyTable::Optional(const char* what, nb::handle array, const nb::object& dtype,
                                             bool writable, const Shape& shape) {
  if (array.is_none()) return nullptr;
  auto view = std::make_unique<ArrayView>(what, array, dtype, writable);
  view->ExpectShape(what, shape);
  return view;
}

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

}  // namespace kvtable
