// kvtools._device_table: tables in device memory for Python, over arrays of any library that speaks DLPack
// (CuPy, PyTorch; NumPy for tables on the CPU's threads), without copies.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../cuda/threads_table.h"
#include "arguments.h"
#include "kvtable/device_table.h"
#include "kvtable/parallel_for.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace kvtable {
namespace {

using Input = nb::ndarray<nb::ro, nb::c_contig>;
using Output = nb::ndarray<nb::c_contig>;

nb::dlpack::dtype DtypeOf(ValueType type) {
  switch (type) {
    case ValueType::kFloat64:
      return nb::dtype<double>();
    case ValueType::kFloat16:
      return {static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
    case ValueType::kBFloat16:
      return {static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};
    default:
      return nb::dtype<float>();
  }
}

nb::dlpack::dtype DtypeOf(KeyType type) {
  return type == KeyType::kInt32   ? nb::dtype<int32_t>()
         : type == KeyType::kInt64 ? nb::dtype<int64_t>()
                                   : nb::dtype<uint64_t>();
}

std::string TextOf(nb::dlpack::dtype dtype) {
  constexpr const char* kNames[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  const std::string name = dtype.code < 7 ? kNames[dtype.code] : "unknown";
  return name == "bool" ? name : name + std::to_string(dtype.bits);
}

// (least, most), each a number or None; None: all. What is below 0 is taken modulo 2**64 where `wraps`.
template <class T>
void ReadRange(const char* what, nb::handle range, bool wraps, T* least, T* most) {
  if (range.is_none()) return;
  const auto refuse = [&] {
    ThrowValue(std::string(what) + " is " + kvtable::TextOf(nb::repr(range)) +
               "; expected (least, most), each None or a whole number from 0 to " +
               std::to_string(std::numeric_limits<T>::max()) + ".");
  };
  if (!nb::isinstance<nb::tuple>(range) || nb::len(range) != 2) refuse();
  T* const bounds[] = {least, most};
  for (size_t i = 0; i < 2; ++i) {
    const nb::object bound = range[i];
    if (bound.is_none()) continue;
    if (!nb::isinstance<nb::int_>(bound)) refuse();
    T number = 0;
    const nb::object wrapped = wraps ? nb::object(nb::int_(bound) & nb::int_(UINT64_MAX)) : bound;
    if (!nb::try_cast(wrapped, number)) refuse();
    *bounds[i] = number;
  }
}

RowPredicate PredicateOf(nb::handle frequency, nb::handle version, nb::handle score, nb::handle key,
                         const nb::int_& key_mask) {
  RowPredicate predicate;
  ReadRange("frequency", frequency, false, &predicate.least_frequency, &predicate.most_frequency);
  ReadRange("version", version, false, &predicate.least_version, &predicate.most_version);
  ReadRange("score", score, false, &predicate.least_score, &predicate.most_score);
  ReadRange("key", key, true, &predicate.least_key, &predicate.most_key);
  predicate.key_mask = nb::cast<uint64_t>(key_mask & nb::int_(UINT64_MAX));
  return predicate;
}

class PyDeviceTable {
 public:
  PyDeviceTable(nb::handle key_dtype, nb::handle value_dtype, int64_t dim, const std::string& device,
                nb::handle initializer, nb::handle slots, int64_t capacity_hint,
                std::optional<int64_t> max_hbm, int64_t max_capacity, const std::string& eviction,
                std::optional<int64_t> move_hot_rows, const std::string& name)
      : is_cuda_(device == "cuda") {
    if (device != "cuda" && device != "threads")
      ThrowValue("device is '" + device + "'; expected 'cuda' or 'threads'.");
    options_.name = name;
    options_.key_type = KeyTypeOf(NameOfDtype(key_dtype));
    options_.value_type = ValueTypeOf(NameOfDtype(value_dtype));
    options_.dim = dim;
    value_dtype_ = DtypeNamed(NameOfDtype(value_dtype));
    options_.initializer = InitializerOf(initializer, options_.value_type, value_dtype_, dim);
    if (!slots.is_none()) options_.slots = SlotsOf(slots);
    options_.capacity_hint = capacity_hint;
    if (max_hbm.has_value()) options_.max_hbm = *max_hbm;
    options_.max_capacity = max_capacity;
    options_.eviction = EvictionOf(eviction);
    if (move_hot_rows.has_value()) options_.move_hot_rows = *move_hot_rows;
    nb::gil_scoped_release released;
    if (is_cuda_) {
      table_ = MakeCudaTable(options_);
    } else {
      pool_ = MakeThreadPool(2);
      table_ = MakeThreadsTable(options_, pool_.get());
    }
  }

  int64_t MaxCapacity() const { return options_.max_capacity; }
  std::string EvictionName() const { return NameOf(options_.eviction); }
  uint64_t Generation() const {
    nb::gil_scoped_release released;
    return table_->generation();
  }

  nb::dict GetInitializer() const {
    Initializer initializer;
    {
      nb::gil_scoped_release released;
      initializer = table_->initializer();
    }
    return DictOf(initializer, options_.value_type, value_dtype_, options_.dim);
  }

  void SetInitializer(nb::handle spec, uintptr_t stream) {
    const Initializer initializer = InitializerOf(spec, options_.value_type, value_dtype_, options_.dim);
    nb::gil_scoped_release released;
    table_->SetInitializer(initializer, Stream(stream));
  }

  nb::list GetSlots() const { return ListOf(Schema().slots); }

  uint64_t EnsureSlots(nb::handle specs, uintptr_t stream) {
    const std::vector<SlotSpec> slots = SlotsOf(specs);
    nb::gil_scoped_release released;
    return table_->EnsureSlots(slots, Stream(stream));
  }

  int64_t Size() const {
    nb::gil_scoped_release released;
    return table_->Size();
  }

  nb::dict Memory() const {
    DeviceMemoryUse use;
    {
      nb::gil_scoped_release released;
      use = table_->Memory();
    }
    nb::dict dict;
    dict["rows"] = use.rows;
    dict["row_bytes"] = use.row_bytes;
    dict["index_bytes"] = use.index_bytes;
    dict["column_bytes"] = use.column_bytes;
    dict["slack_bytes"] = use.slack_bytes;
    dict["scratch_bytes"] = use.scratch_bytes;
    dict["host_bytes"] = use.host_bytes;
    return dict;
  }

  void Gather(const Input& keys, const Output& out, const std::string& missing,
              const std::optional<Input>& defaults, const std::optional<Output>& found, uintptr_t stream) {
    const DeviceKeys batch = Keys(keys, false);
    Check("out", out, DtypeOf(options_.value_type), {batch.n, options_.dim});
    bool* const flags = Flags("found", found, batch.n);
    Missing how = Missing::kZeros;
    int64_t num_defaults = 0;
    if (defaults.has_value()) {
      how = Missing::kDefault;
      num_defaults = defaults->ndim() > 0 ? static_cast<int64_t>(defaults->shape(0)) : 0;
      Check("defaults", *defaults, DtypeOf(options_.value_type), {num_defaults, options_.dim});
    } else {
      how = MissingOf(missing);
    }
    nb::gil_scoped_release released;
    table_->Gather(batch, out.data(), how, defaults.has_value() ? defaults->data() : nullptr, num_defaults,
                   flags, Stream(stream));
  }

  void GatherOrInsert(const Input& keys, const Output& out, uint32_t frequency, uint32_t version,
                      const std::optional<Output>& inserted, bool distinct, uintptr_t stream,
                      double admission, uint64_t seed, const std::optional<Output>& evicted_keys,
                      const std::optional<Output>& evicted_values,
                      const std::optional<Output>& evicted_scores,
                      const std::optional<Output>& evicted_count) {
    const DeviceKeys batch = Keys(keys, distinct);
    Check("out", out, DtypeOf(options_.value_type), {batch.n, options_.dim});
    const DeviceEvicted evicted = EvictedOf(evicted_keys, evicted_values, evicted_scores, evicted_count);
    DeviceInsertion insertion;
    insertion.stamp = {frequency, version};
    insertion.inserted = Flags("inserted", inserted, batch.n);
    insertion.admission = admission;
    insertion.admission_seed = seed;
    if (evicted.WantsRows() || evicted.count != nullptr) insertion.evicted = &evicted;
    nb::gil_scoped_release released;
    table_->GatherOrInsert(batch, out.data(), insertion, Stream(stream));
  }

  void GatherColumns(const Input& keys, const nb::dict& columns, const std::optional<Output>& found,
                     uintptr_t stream) {
    const DeviceKeys batch = Keys(keys, false);
    const std::vector<ColumnOut> out = Columns(columns, batch.n);
    bool* const flags = Flags("found", found, batch.n);
    nb::gil_scoped_release released;
    table_->GatherColumns(batch, out, flags, Stream(stream));
  }

  void Pointers(const Input& keys, const Output& out, uintptr_t stream) {
    const DeviceKeys batch = Keys(keys, false);
    Check("out", out, nb::dtype<uint64_t>(), {batch.n});
    nb::gil_scoped_release released;
    table_->Pointers(batch, static_cast<void**>(out.data()), Stream(stream));
  }

  void PointersOrInsert(const Input& keys, const Output& out, uint32_t frequency, uint32_t version,
                        const std::optional<Output>& inserted, uintptr_t stream) {
    const DeviceKeys batch = Keys(keys, false);
    Check("out", out, nb::dtype<uint64_t>(), {batch.n});
    bool* const flags = Flags("inserted", inserted, batch.n);
    nb::gil_scoped_release released;
    table_->PointersOrInsert(batch, static_cast<void**>(out.data()), {frequency, version}, flags,
                             Stream(stream));
  }

  void GatherPooled(const Input& keys, const Input& splits, const Output& out, const std::string& combiner,
                    const std::optional<Input>& weights, const std::string& missing, uintptr_t stream) {
    const DeviceKeys batch = Keys(keys, false);
    const DeviceBags bags = BagsOf(splits, combiner, weights, batch.n);
    Check("out", out, DtypeOf(options_.value_type), {bags.bags, options_.dim});
    const Missing how = MissingOf(missing);
    nb::gil_scoped_release released;
    table_->GatherPooled(batch, bags, how, out.data(), Stream(stream));
  }

  void GatherPooledOrInsert(const Input& keys, const Input& splits, const Output& out,
                            const std::string& combiner, const std::optional<Input>& weights,
                            uint32_t frequency, uint32_t version, uintptr_t stream) {
    const DeviceKeys batch = Keys(keys, false);
    const DeviceBags bags = BagsOf(splits, combiner, weights, batch.n);
    Check("out", out, DtypeOf(options_.value_type), {bags.bags, options_.dim});
    nb::gil_scoped_release released;
    table_->GatherPooledOrInsert(batch, bags, {frequency, version}, out.data(), Stream(stream));
  }

  void MakeSplits(const Input& row_ids, const Output& out, uintptr_t stream) {
    const bool wide = row_ids.ndim() == 2;  // (n, rank): the first of each
    const int64_t n = row_ids.ndim() > 0 ? static_cast<int64_t>(row_ids.shape(0)) : -1;
    const int64_t stride = wide ? static_cast<int64_t>(row_ids.shape(1)) : 1;
    if (stride < 1)
      ThrowValue("row_ids has shape (" + std::to_string(n) + ", 0); expected (n) or (n, rank).");
    Check("row_ids", row_ids, nb::dtype<int64_t>(), wide ? Shape{n, stride} : Shape{n});
    if (out.ndim() != 1 || out.shape(0) < 1) ThrowValue("out must be an array of bags + 1 numbers.");
    const int64_t bags = static_cast<int64_t>(out.shape(0)) - 1;
    Check("out", out, nb::dtype<int64_t>(), {bags + 1});
    nb::gil_scoped_release released;
    table_->MakeSplits(static_cast<const int64_t*>(row_ids.data()), stride, n, bags,
                       static_cast<int64_t*>(out.data()), Stream(stream));
  }

  void CheckBags(uintptr_t stream) {
    nb::gil_scoped_release released;
    table_->CheckBags(Stream(stream));
  }

  void SpreadGradient(const Input& splits, const Input& gradient, const Output& out,
                      const std::string& combiner, const std::optional<Input>& weights, uintptr_t stream) {
    const int64_t n = out.ndim() > 0 ? static_cast<int64_t>(out.shape(0)) : -1;
    DeviceBags bags = BagsOf(splits, combiner, weights, n);
    bags.ids = n;
    Check("gradient", gradient, DtypeOf(options_.value_type), {bags.bags, options_.dim});
    Check("out", out, DtypeOf(options_.value_type), {n, options_.dim});
    nb::gil_scoped_release released;
    table_->SpreadGradient(bags, gradient.data(), out.data(), Stream(stream));
  }

  void WeightsGradient(const Input& keys, const Input& splits, const Input& weights, const Input& pooled,
                       const Input& gradient, const Output& out, const std::string& combiner,
                       const std::string& missing, uintptr_t stream) {
    const DeviceKeys batch = Keys(keys, false);
    const DeviceBags bags = BagsOf(splits, combiner, weights, batch.n);
    Check("pooled", pooled, DtypeOf(options_.value_type), {bags.bags, options_.dim});
    Check("gradient", gradient, DtypeOf(options_.value_type), {bags.bags, options_.dim});
    Check("out", out, options_.value_type == ValueType::kFloat64 ? nb::dtype<double>() : nb::dtype<float>(),
          {batch.n});
    const Missing how = MissingOf(missing);
    nb::gil_scoped_release released;
    table_->WeightsGradient(batch, bags, how, pooled.data(), gradient.data(), out.data(), Stream(stream));
  }

  void Contains(const Input& keys, const Output& out, uintptr_t stream) {
    const DeviceKeys batch = Keys(keys, false);
    Check("out", out, nb::dtype<bool>(), {batch.n});
    nb::gil_scoped_release released;
    table_->Contains(batch, static_cast<bool*>(out.data()), Stream(stream));
  }

  void GatherStamps(const Input& keys, const Output& frequencies, const Output& versions, uintptr_t stream) {
    const DeviceKeys batch = Keys(keys, false);
    Check("frequencies", frequencies, nb::dtype<uint32_t>(), {batch.n});
    Check("versions", versions, nb::dtype<uint32_t>(), {batch.n});
    nb::gil_scoped_release released;
    table_->GatherStamps(batch, static_cast<uint32_t*>(frequencies.data()),
                         static_cast<uint32_t*>(versions.data()), Stream(stream));
  }

  void Upsert(const Input& keys, const Input& values, uint32_t frequency, uint32_t version, bool distinct,
              uintptr_t stream) {
    const DeviceKeys batch = Keys(keys, distinct);
    Check("values", values, DtypeOf(options_.value_type), {batch.n, options_.dim});
    nb::gil_scoped_release released;
    table_->Upsert(batch, values.data(), {frequency, version}, Stream(stream));
  }

  void InsertAndEvict(const Input& keys, const Input& values, const std::optional<Input>& scores,
                      uint32_t frequency, uint32_t version, bool distinct, uintptr_t stream,
                      const std::optional<Output>& evicted_keys, const std::optional<Output>& evicted_values,
                      const std::optional<Output>& evicted_scores,
                      const std::optional<Output>& evicted_count) {
    const DeviceKeys batch = Keys(keys, distinct);
    Check("values", values, DtypeOf(options_.value_type), {batch.n, options_.dim});
    const auto* const given = Numbers<uint64_t>("scores", scores, batch.n);
    const DeviceEvicted evicted = EvictedOf(evicted_keys, evicted_values, evicted_scores, evicted_count);
    nb::gil_scoped_release released;
    table_->InsertAndEvict(batch, values.data(), given, {frequency, version}, evicted, Stream(stream));
  }

  void UpsertColumns(const Input& keys, const nb::dict& columns, uint32_t frequency, uint32_t version,
                     bool distinct, uintptr_t stream) {
    const DeviceKeys batch = Keys(keys, distinct);
    const std::vector<ColumnIn> in = InputColumns(columns, batch.n);
    nb::gil_scoped_release released;
    table_->UpsertColumns(batch, in, {frequency, version}, Stream(stream));
  }

  void Accumulate(const Input& keys, const Input& deltas, bool from_zeros, uint32_t frequency,
                  uint32_t version, uintptr_t stream) {
    const DeviceKeys batch = Keys(keys, false);
    Check("deltas", deltas, DtypeOf(options_.value_type), {batch.n, options_.dim});
    nb::gil_scoped_release released;
    table_->Accumulate(batch, deltas.data(), from_zeros, {frequency, version}, Stream(stream));
  }

  void Apply(const std::string& optimizer, const Input& keys, const Input& gradients,
             const nb::dict& hyperparameters, const std::vector<std::string>& slots, bool distinct,
             bool stochastic_rounding, uint64_t seed, bool skip_nonfinite, uint32_t frequency,
             uint32_t version, uintptr_t stream) {
    const DeviceKeys batch = Keys(keys, distinct);
    Check("gradients", gradients, DtypeOf(options_.value_type), {batch.n, options_.dim});
    Update update = UpdateOf(optimizer, hyperparameters);
    update.stochastic_rounding = stochastic_rounding;
    update.seed = seed;
    update.skip_nonfinite = skip_nonfinite;
    const RowSchema schema = Schema();
    SlotColumns columns({}, schema.generation);
    for (const std::string& slot : slots) columns.columns.push_back(ColumnNamed(slot, schema.slots).first);
    nb::gil_scoped_release released;
    table_->Apply(batch, gradients.data(), update, columns, {frequency, version}, Stream(stream));
  }

  int64_t SkippedUpdates() const {
    nb::gil_scoped_release released;
    return table_->SkippedUpdates();
  }

  void Zeroed(const Input& keys, const Output& out, uintptr_t stream) {
    const DeviceKeys batch = Keys(keys, false);
    Check("out", out, nb::dtype<bool>(), {batch.n});
    nb::gil_scoped_release released;
    table_->Zeroed(batch, static_cast<bool*>(out.data()), Stream(stream));
  }

  int64_t ZeroedRows() {
    nb::gil_scoped_release released;
    return table_->ZeroedRows();
  }

  void Import(const Input& keys, const nb::dict& columns, const std::optional<Input>& frequencies,
              const std::optional<Input>& versions, uintptr_t stream, const std::optional<Input>& scores) {
    const DeviceKeys batch = Keys(keys, false);
    const std::vector<ColumnIn> in = InputColumns(columns, batch.n);
    const auto* const freqs = Numbers<uint32_t>("frequencies", frequencies, batch.n);
    const auto* const stamped = Numbers<uint32_t>("versions", versions, batch.n);
    const auto* const given = Numbers<uint64_t>("scores", scores, batch.n);
    nb::gil_scoped_release released;
    table_->Import(batch, in, freqs, stamped, given, Stream(stream));
  }

  int64_t EvictedRows() const {
    nb::gil_scoped_release released;
    return table_->EvictedCount();
  }

  void Scores(const Input& keys, const Output& out, uintptr_t stream) {
    const DeviceKeys batch = Keys(keys, false);
    Check("out", out, nb::dtype<uint64_t>(), {batch.n});
    nb::gil_scoped_release released;
    table_->Scores(batch, static_cast<uint64_t*>(out.data()), Stream(stream));
  }

  void SetScores(const Input& keys, const Input& scores, uintptr_t stream) {
    const DeviceKeys batch = Keys(keys, false);
    Check("scores", scores, nb::dtype<uint64_t>(), {batch.n});
    nb::gil_scoped_release released;
    table_->SetScores(batch, static_cast<const uint64_t*>(scores.data()), Stream(stream));
  }

  void SetEpoch(uint32_t epoch) {
    nb::gil_scoped_release released;
    table_->SetEpoch(epoch);
  }

  void Remove(const Input& keys, const std::optional<Output>& removed, uintptr_t stream) {
    const DeviceKeys batch = Keys(keys, false);
    auto* const count = Numbers<uint64_t>("removed", removed, 1);
    nb::gil_scoped_release released;
    table_->Remove(batch, count, Stream(stream));
  }

  void RemoveIf(const RowPredicate& predicate, const std::optional<Output>& removed, uintptr_t stream) {
    auto* const count = Numbers<uint64_t>("removed", removed, 1);
    nb::gil_scoped_release released;
    table_->RemoveIf(predicate, count, Stream(stream));
  }

  void MoveHotRows(int64_t most, uintptr_t stream) {
    nb::gil_scoped_release released;
    table_->MoveHotRows(most, Stream(stream));
  }

  void InDeviceMemory(const Input& keys, const Output& out, uintptr_t stream) {
    const DeviceKeys batch = Keys(keys, false);
    Check("out", out, nb::dtype<bool>(), {batch.n});
    nb::gil_scoped_release released;
    table_->InDeviceMemory(batch, static_cast<bool*>(out.data()), Stream(stream));
  }

  void Shrink(int64_t rows, const std::string& first, uintptr_t stream) {
    if (first != "oldest" && first != "least_frequent") {
      ThrowValue("first is '" + first + "'; expected 'oldest' or 'least_frequent'.");
    }
    nb::gil_scoped_release released;
    table_->Shrink(rows, first == "oldest" ? ShrinkOrder::kOldest : ShrinkOrder::kLeastFrequent,
                   Stream(stream));
  }

  void Clear(uintptr_t stream) {
    nb::gil_scoped_release released;
    table_->Clear(Stream(stream));
  }

  void Reserve(int64_t rows, int64_t batch, uintptr_t stream) {
    nb::gil_scoped_release released;
    table_->Reserve(rows, batch, Stream(stream));
  }

  std::unique_ptr<DeviceExporter> Export(const RowPredicate& predicate) {
    nb::gil_scoped_release released;
    return table_->Export(predicate);
  }

  int64_t ExportNext(DeviceExporter* exporter, const Output& keys, const nb::dict& columns,
                     const std::optional<Output>& frequencies, const std::optional<Output>& versions,
                     uintptr_t stream, const std::optional<Output>& scores) {
    DeviceExporter::Buffers out;
    const int64_t capacity = keys.ndim() == 1 ? static_cast<int64_t>(keys.shape(0)) : -1;
    Check("keys", keys, DtypeOf(options_.key_type), {capacity});
    out.keys = keys.data();
    out.freqs = Numbers<uint32_t>("frequencies", frequencies, capacity);
    out.versions = Numbers<uint32_t>("versions", versions, capacity);
    out.scores = Numbers<uint64_t>("scores", scores, capacity);
    out.columns = Columns(columns, capacity);
    nb::gil_scoped_release released;
    return exporter->Next(capacity, out, Stream(stream));
  }

 private:
  static DeviceStream Stream(uintptr_t stream) { return reinterpret_cast<DeviceStream>(stream); }

  template <class Array>
  void Check(const char* what, const Array& array, nb::dlpack::dtype dtype, const Shape& shape) const {
    const int device = array.device_type();
    const bool reached = is_cuda_ ? device == nb::device::cuda::value ||
                                        device == nb::device::cuda_managed::value ||
                                        device == nb::device::cuda_host::value
                                  : device == nb::device::cpu::value;
    if (!reached) {
      ThrowType(std::string(what) + " is in the memory of DLPack device type " + std::to_string(device) +
                "; expected " + (is_cuda_ ? "CUDA device memory." : "host memory."));
    }
    // NumPy passes no bfloat16 by DLPack, so its bits are taken, too.
    const bool bits = TextOf(dtype) == "bfloat16" && array.dtype() == nb::dtype<uint16_t>();
    if (array.dtype() != dtype && !bits) {
      ThrowType(std::string(what) + " has dtype " + TextOf(array.dtype()) + "; expected " + TextOf(dtype) +
                ".");
    }
    Shape got;
    for (size_t i = 0; i < array.ndim(); ++i) got.push_back(static_cast<int64_t>(array.shape(i)));
    if (got != shape) {
      ThrowValue(std::string(what) + " has shape " + kvtable::TextOf(got) + "; expected " +
                 kvtable::TextOf(shape) + ".");
    }
  }

  DeviceKeys Keys(const Input& keys, bool distinct) const {
    const int64_t n = keys.ndim() == 1 ? static_cast<int64_t>(keys.shape(0)) : -1;
    Check("keys", keys, DtypeOf(options_.key_type), {n});
    return {keys.data(), n, distinct};
  }

  DeviceBags BagsOf(const Input& splits, const std::string& combiner, const std::optional<Input>& weights,
                    int64_t n) const {
    if (splits.ndim() != 1 || splits.shape(0) < 1) ThrowValue("splits must be an array of bags + 1 numbers.");
    DeviceBags bags;
    bags.bags = static_cast<int64_t>(splits.shape(0)) - 1;
    Check("splits", splits, nb::dtype<int64_t>(), {bags.bags + 1});
    bags.splits = static_cast<const int64_t*>(splits.data());
    if (weights.has_value()) {
      const bool wide = options_.value_type == ValueType::kFloat64;
      Check("weights", *weights, wide ? nb::dtype<double>() : nb::dtype<float>(), {n});
      bags.weights = weights->data();
    }
    if (combiner != "sum" && combiner != "mean" && combiner != "sqrtn") {
      ThrowValue("combiner is '" + combiner + "'; expected 'sum', 'mean' or 'sqrtn'.");
    }
    bags.combiner = combiner == "sum"    ? Combiner::kSum
                    : combiner == "mean" ? Combiner::kMean
                                         : Combiner::kSqrtN;
    return bags;
  }

  bool* Flags(const char* what, const std::optional<Output>& flags, int64_t n) const {
    if (!flags.has_value()) return nullptr;
    Check(what, *flags, nb::dtype<bool>(), {n});
    return static_cast<bool*>(flags->data());
  }

  // Null where there is no array.
  template <class T>
  const T* Numbers(const char* what, const std::optional<Input>& array, int64_t n) const {
    if (!array.has_value()) return nullptr;
    Check(what, *array, nb::dtype<T>(), {n});
    return static_cast<const T*>(array->data());
  }
  template <class T>
  T* Numbers(const char* what, const std::optional<Output>& array, int64_t n) const {
    if (!array.has_value()) return nullptr;
    Check(what, *array, nb::dtype<T>(), {n});
    return static_cast<T*>(array->data());
  }

  // The three arrays of rows have room for equally many.
  DeviceEvicted EvictedOf(const std::optional<Output>& keys, const std::optional<Output>& values,
                          const std::optional<Output>& scores, const std::optional<Output>& count) const {
    DeviceEvicted evicted;
    for (const std::optional<Output>* array : {&keys, &values, &scores}) {
      if (!array->has_value()) continue;
      evicted.capacity = (*array)->ndim() > 0 ? static_cast<int64_t>((*array)->shape(0)) : -1;
      break;
    }
    if (keys.has_value()) {
      Check("evicted_keys", *keys, DtypeOf(options_.key_type), {evicted.capacity});
      evicted.keys = keys->data();
    }
    if (values.has_value()) {
      Check("evicted_values", *values, DtypeOf(options_.value_type), {evicted.capacity, options_.dim});
      evicted.values = values->data();
    }
    evicted.scores = Numbers<uint64_t>("evicted_scores", scores, evicted.capacity);
    evicted.count = Numbers<uint64_t>("evicted_count", count, 1);
    return evicted;
  }

  static Missing MissingOf(const std::string& missing) {
    if (missing != "zeros" && missing != "initial") {
      ThrowValue("missing is '" + missing + "'; expected 'zeros' or 'initial'.");
    }
    return missing == "zeros" ? Missing::kZeros : Missing::kInitial;
  }

  // Those there are now.
  RowSchema Schema() const {
    nb::gil_scoped_release released;
    return table_->schema();
  }

  // By name: "value", or a slot's.
  std::pair<int, int64_t> ColumnNamed(const std::string& name, const std::vector<SlotSpec>& slots) const {
    if (name == "value") return {0, options_.dim};
    for (size_t s = 0; s < slots.size(); ++s) {
      if (slots[s].name == name) return {static_cast<int>(s) + 1, slots[s].width};
    }
    std::string have = "'value'";
    for (const SlotSpec& slot : slots) have += ", '" + slot.name + "'";
    ThrowValue("The table has no column '" + name + "'; it has " + have + ".");
  }

  std::vector<ColumnOut> Columns(const nb::dict& columns, int64_t n) const {
    const RowSchema schema = Schema();
    std::vector<ColumnOut> out;
    for (auto [key, value] : columns) {
      const std::string name = kvtable::TextOf(key);
      const auto [column, width] = ColumnNamed(name, schema.slots);
      const Output array = nb::cast<Output>(value, false);
      Check(name.c_str(), array, DtypeOf(options_.value_type), {n, width});
      out.push_back({column, array.data(), width, schema.generation});
    }
    return out;
  }

  std::vector<ColumnIn> InputColumns(const nb::dict& columns, int64_t n) const {
    const RowSchema schema = Schema();
    std::vector<ColumnIn> in;
    for (auto [key, value] : columns) {
      const std::string name = kvtable::TextOf(key);
      const auto [column, width] = ColumnNamed(name, schema.slots);
      const Input array = nb::cast<Input>(value, false);
      Check(name.c_str(), array, DtypeOf(options_.value_type), {n, width});
      in.push_back({column, array.data(), width, schema.generation});
    }
    return in;
  }

  const bool is_cuda_;
  nb::object value_dtype_;
  DeviceTableOptions options_;         // but for slots and initializer, as the table is
  std::unique_ptr<ParallelFor> pool_;  // outlives the table
  std::unique_ptr<DeviceTable> table_;
};

// Keeps its table alive.
struct PyDeviceExporter {
  nb::object table;
  std::unique_ptr<DeviceExporter> exporter;
};

}  // namespace
}  // namespace kvtable

NB_MODULE(_device_table, m) {
  using kvtable::PyDeviceExporter;
  using kvtable::PyDeviceTable;
  m.doc() = "Tables in the memory of a CUDA device, over arrays of any library that speaks DLPack.";

  nb::register_exception_translator(kvtable::TranslateError);

  m.def(
      "stand_in_for_gpus",
      [] {
        static const std::unique_ptr<kvtable::ParallelFor> threads = kvtable::MakeThreadPool(2);
        kvtable::Devices().table = [](const kvtable::DeviceTableOptions& options) {
          return kvtable::MakeThreadsTable(options, threads.get());
        };
        kvtable::Devices().work = [](kvtable::DeviceAllocator* allocator) {
          return kvtable::MakeThreadsWork(allocator, threads.get());
        };
      },
      "Makes the tables of GPUs, in this process, on the CPU's threads from now on: to test without a GPU.");

  nb::class_<PyDeviceExporter>(m, "Exporter", "Reads a table in chunks; see DeviceTable.export.")
      .def(
          "next",
          [](PyDeviceExporter& self, const kvtable::Output& keys, const nb::dict& columns,
             const std::optional<kvtable::Output>& frequencies,
             const std::optional<kvtable::Output>& versions, uintptr_t stream,
             const std::optional<kvtable::Output>& scores) {
            return nb::cast<PyDeviceTable*>(self.table)
                ->ExportNext(self.exporter.get(), keys, columns, frequencies, versions, stream, scores);
          },
          nb::arg("keys").noconvert(), "columns"_a = nb::dict(),
          nb::arg("frequencies").noconvert() = nb::none(), nb::arg("versions").noconvert() = nb::none(),
          "stream"_a = 0, nb::kw_only(), nb::arg("scores").noconvert() = nb::none(),
          "Writes as many rows as keys has room for, at most, and returns how many; -1 at the end. A chunk "
          "may be empty. columns: a dict from 'value' or a slot's name to an array (n, width); frequencies "
          "and versions: uint32 (n); scores: uint64 (n), zeros where the table is not bounded.")
      .def_prop_ro(
          "max_rows", [](PyDeviceExporter& self) { return self.exporter->max_rows(); },
          "At least the number of rows still to come, as long as nothing is inserted.");

  static const std::string predicate_doc =
      "A row is meant where all that is given holds. Each range is (least, most), both among what is "
      "meant; None "
      "in place of one is no bound. frequency and version: of the stamps, to 2**32 - 1; score: to 2**64 - 1, "
      "and 0 "
      "for all rows of a table that is not bounded; key: the bits of the key (an int32 is sign-extended) "
      "that "
      "are in "
      "key_mask, as a number from 0 to 2**64 - 1 (a negative key counts as itself + 2**64). Raises "
      "ValueError "
      "on a "
      "range that is none.";

  nb::class_<PyDeviceTable>(
      m, "DeviceTable",
      "A key-value table in device memory.\n\n"
      "Arrays are C-contiguous, of the table's dtypes, in memory that its device reaches: device='cuda' "
      "takes arrays "
      "of CuPy or PyTorch, device='threads' (the same code on the CPU's threads, for tests) those of NumPy. "
      "Work is "
      "queued on `stream`, the number of a CUDA stream (0: the default one), and arrays must stay until it "
      "is done. "
      "Shapes, dtypes and semantics are those of kvtools._kvtable.Table; slots and initializers are spelled "
      "as "
      "there.\n\n"
      ">>> table = DeviceTable('int64', 'float32', 2, device='threads', initializer=0.5)\n"
      ">>> out = np.empty((3, 2), np.float32)\n"
      ">>> table.gather_or_insert(np.array([7, -1, 7]), out)\n"
      ">>> out.tolist(), len(table)\n"
      "([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]], 2)\n")
      .def(
          nb::init<nb::handle, nb::handle, int64_t, const std::string&, nb::handle, nb::handle, int64_t,
                   std::optional<int64_t>, int64_t, const std::string&, std::optional<int64_t>,
                   const std::string&>(),
          "key_dtype"_a, "value_dtype"_a, "dim"_a, nb::kw_only(), "device"_a = "cuda",
          "initializer"_a = nb::none(), "slots"_a = nb::none(), "capacity_hint"_a = 0,
          "max_hbm"_a = nb::none(), "max_capacity"_a = 0, "eviction"_a = "lru",
          "move_hot_rows"_a = nb::none(), "name"_a = "",
          "max_hbm: bytes of rows in device memory; what is beyond lies in pinned host memory. "
          "max_capacity: the "
          "most rows that a batch leaves behind; 0: no bound. eviction: what a row's score is: 'lru', 'lfu', "
          "'custom', 'epoch_lru' or 'epoch_lfu'. move_hot_rows: how many rows in host memory may change "
          "places with "
          "rows in device memory after every 8 batches that insert or write; 0: never; None: 4096.")
      .def_prop_ro("max_capacity", &PyDeviceTable::MaxCapacity,
                   "The most rows that a batch leaves behind; 0 where there is no bound.")
      .def_prop_ro("eviction", &PyDeviceTable::EvictionName,
                   "What a row's score is: 'lru', 'lfu', 'custom', 'epoch_lru' or 'epoch_lfu'.")
      .def_prop_ro("evicted_rows", &PyDeviceTable::EvictedRows,
                   "How many rows were evicted so far. Waits for all that was queued.")
      .def_prop_ro("slots", &PyDeviceTable::GetSlots, "A list of (name, width, init, constant).")
      .def_prop_ro("generation", &PyDeviceTable::Generation,
                   "A number that changes whenever the layout of rows does.")
      .def(
          "ensure_slots", &PyDeviceTable::EnsureSlots, "slots"_a, "stream"_a = 0,
          "Makes the slots exactly these, in this order, and returns the generation: a slot of the same name "
          "and "
          "width keeps its contents, a new one starts from its initial contents, others are dropped. Waits "
          "for all "
          "that was queued, and for its own work. Raises MemoryError where there is none: the table is as it "
          "was.\n\n"
          ">>> table = DeviceTable('int64', 'float32', 2, device='threads')\n"
          ">>> table.ensure_slots([('m', 2, 'constant', 0.1)]) == table.generation\n"
          "True\n"
          ">>> table.slots\n"
          "[('m', 2, 'constant', 0.1)]\n")
      .def_prop_ro("initializer", &PyDeviceTable::GetInitializer, "The initializer as a dict.")
      .def("set_initializer", &PyDeviceTable::SetInitializer, nb::arg("initializer").none(), "stream"_a = 0,
           "Replaces the initial values of rows not yet there.")
      .def("__len__", &PyDeviceTable::Size, "The number of rows. Waits for all that was queued.")
      .def("memory", &PyDeviceTable::Memory, "Bytes by what they are for. Waits for all that was queued.")
      .def("gather", &PyDeviceTable::Gather, nb::arg("keys").noconvert(), nb::arg("out").noconvert(),
           "missing"_a = "zeros", nb::arg("defaults").noconvert() = nb::none(),
           nb::arg("found").noconvert() = nb::none(), "stream"_a = 0,
           "Reads values (n, dim) into out. A missing key gives zeros, its initial value (missing='initial') "
           "or "
           "defaults[i % len(defaults)].")
      .def("gather_or_insert", &PyDeviceTable::GatherOrInsert, nb::arg("keys").noconvert(),
           nb::arg("out").noconvert(), "frequency"_a = 0, "version"_a = 0,
           nb::arg("inserted").noconvert() = nb::none(), "distinct"_a = false, "stream"_a = 0, nb::kw_only(),
           "admission"_a = 1.0, "seed"_a = 0, nb::arg("evicted_keys").noconvert() = nb::none(),
           nb::arg("evicted_values").noconvert() = nb::none(),
           nb::arg("evicted_scores").noconvert() = nb::none(),
           nb::arg("evicted_count").noconvert() = nb::none(),
           "Reads values into out; a missing key is inserted with its initial value, and stamped. admission: "
           "the "
           "probability that it is, else it gives zeros; a function of seed and key, so give each call "
           "another seed. "
           "evicted_keys and the rest: as for insert_and_evict.")
      .def("gather_columns", &PyDeviceTable::GatherColumns, nb::arg("keys").noconvert(), "columns"_a,
           nb::arg("found").noconvert() = nb::none(), "stream"_a = 0,
           "Reads columns: a dict from 'value' or a slot's name to the array (n, width) that takes it.")
      .def("pointers", &PyDeviceTable::Pointers, nb::arg("keys").noconvert(), nb::arg("out").noconvert(),
           "stream"_a = 0, "Writes the address of each key's row to out, uint64 (n); 0 where it is missing.")
      .def("pointers_or_insert", &PyDeviceTable::PointersOrInsert, nb::arg("keys").noconvert(),
           nb::arg("out").noconvert(), "frequency"_a = 0, "version"_a = 0,
           nb::arg("inserted").noconvert() = nb::none(), "stream"_a = 0,
           "The same; a missing key is inserted with its initial value, and stamped.")
      .def("gather_pooled", &PyDeviceTable::GatherPooled, nb::arg("keys").noconvert(),
           nb::arg("splits").noconvert(), nb::arg("out").noconvert(), "combiner"_a = "mean",
           nb::arg("weights").noconvert() = nb::none(), "missing"_a = "zeros", "stream"_a = 0,
           "Combines the rows of each bag of keys, [splits[b], splits[b + 1]), into out (bags, dim). splits, "
           "int64, "
           "rise from 0 to the number of keys: check_bags tells whether they do.")
      .def("gather_pooled_or_insert", &PyDeviceTable::GatherPooledOrInsert, nb::arg("keys").noconvert(),
           nb::arg("splits").noconvert(), nb::arg("out").noconvert(), "combiner"_a = "mean",
           nb::arg("weights").noconvert() = nb::none(), "frequency"_a = 0, "version"_a = 0, "stream"_a = 0,
           "The same; a missing key is inserted with its initial value, and stamped.")
      .def(
          "spread_gradient", &PyDeviceTable::SpreadGradient, nb::arg("splits").noconvert(),
          nb::arg("gradient").noconvert(), nb::arg("out").noconvert(), "combiner"_a = "mean",
          nb::arg("weights").noconvert() = nb::none(), "stream"_a = 0,
          "Writes the gradient of each key's row (n, dim) to out, given that of what was pooled (bags, dim).")
      .def("weights_gradient", &PyDeviceTable::WeightsGradient, nb::arg("keys").noconvert(),
           nb::arg("splits").noconvert(), nb::arg("weights").noconvert(), nb::arg("pooled").noconvert(),
           nb::arg("gradient").noconvert(), nb::arg("out").noconvert(), "combiner"_a = "mean",
           "missing"_a = "zeros", "stream"_a = 0,
           "Writes the gradient of the weights (n) to out, given what the lookup pooled and the gradient of "
           "that, both "
           "(bags, dim).")
      .def(
          "make_splits", &PyDeviceTable::MakeSplits, nb::arg("row_ids").noconvert(),
          nb::arg("out").noconvert(), "stream"_a = 0,
          "Writes to out, int64 (bags + 1), the splits of sparse indices: bag b has the entries whose row id "
          "is b. "
          "row_ids: int64 (n), or (n, rank), of which the first column counts; they rise, from 0 to bags - "
          "1: "
          "check_bags tells whether they do.\n\n"
          ">>> table = DeviceTable('int64', 'float32', 2, device='threads')\n"
          ">>> splits = np.empty(4, np.int64)\n"
          ">>> table.make_splits(np.array([0, 2, 2]), splits)\n"
          ">>> splits.tolist()\n"
          "[0, 1, 1, 3]\n")
      .def(
          "check_bags", &PyDeviceTable::CheckBags, "stream"_a = 0,
          "Raises ValueError where splits or row ids that an operation was given since the last call of this "
          "are not "
          "as they have to be; what that operation gave means nothing then. Waits for all that was queued.")
      .def("contains", &PyDeviceTable::Contains, nb::arg("keys").noconvert(), nb::arg("out").noconvert(),
           "stream"_a = 0, "Writes to out, bool (n), whether each key is there.")
      .def("gather_stamps", &PyDeviceTable::GatherStamps, nb::arg("keys").noconvert(),
           nb::arg("frequencies").noconvert(), nb::arg("versions").noconvert(), "stream"_a = 0,
           "Reads frequencies and versions, uint32 (n); zeros where a key is missing.")
      .def("upsert", &PyDeviceTable::Upsert, nb::arg("keys").noconvert(), nb::arg("values").noconvert(),
           "frequency"_a = 0, "version"_a = 0, "distinct"_a = false, "stream"_a = 0,
           "Writes values (n, dim); of equal keys the last wins. distinct: there are none, which saves work.")
      .def("insert_and_evict", &PyDeviceTable::InsertAndEvict, nb::arg("keys").noconvert(),
           nb::arg("values").noconvert(), nb::arg("scores").noconvert() = nb::none(), "frequency"_a = 0,
           "version"_a = 0, "distinct"_a = false, "stream"_a = 0, nb::kw_only(),
           nb::arg("evicted_keys").noconvert() = nb::none(),
           nb::arg("evicted_values").noconvert() = nb::none(),
           nb::arg("evicted_scores").noconvert() = nb::none(),
           nb::arg("evicted_count").noconvert() = nb::none(),
           "As upsert, and hands out the rows that the batch evicts, the lowest score first. scores: uint64 "
           "(n), the "
           "keys', for a table that evicts by 'custom'. evicted_keys (m), evicted_values (m, dim), "
           "evicted_scores, "
           "uint64 (m): what takes them, each as long as the others; no batch evicts more rows than it has "
           "keys, and "
           "those beyond m are not written. evicted_count: uint64 (1), how many went.\n\n"
           ">>> table = DeviceTable('int64', 'float32', 1, device='threads', max_capacity=1)\n"
           ">>> table.upsert(np.array([5]), np.array([[2.0]], np.float32))\n"
           ">>> gone, count = np.zeros(1, np.int64), np.zeros(1, np.uint64)\n"
           ">>> table.insert_and_evict(np.array([6]), np.array([[3.0]], np.float32), evicted_keys=gone,\n"
           "...                        evicted_count=count)\n"
           ">>> gone.tolist(), count.tolist(), len(table)\n"
           "([5], [1], 1)\n")
      .def("upsert_columns", &PyDeviceTable::UpsertColumns, nb::arg("keys").noconvert(), "columns"_a,
           "frequency"_a = 0, "version"_a = 0, "distinct"_a = false, "stream"_a = 0,
           "Writes the named columns; others of a new row get their initial values.")
      .def("accumulate", &PyDeviceTable::Accumulate, nb::arg("keys").noconvert(),
           nb::arg("deltas").noconvert(), "from_zeros"_a = false, "frequency"_a = 0, "version"_a = 0,
           "stream"_a = 0, "Adds deltas (n, dim), those of equal keys, too.")
      .def("apply", &PyDeviceTable::Apply, "optimizer"_a, nb::arg("keys").noconvert(),
           nb::arg("gradients").noconvert(), "hyperparameters"_a, nb::kw_only(),
           "slots"_a = std::vector<std::string>(), "distinct"_a = false, "stochastic_rounding"_a = false,
           "seed"_a = 0, "skip_nonfinite"_a = false, "frequency"_a = 1, "version"_a = 0, "stream"_a = 0,
           "One training step: updates value and slots of each distinct key by the sum of its gradients "
           "(n, dim). A missing key is inserted first. slots: the columns of the optimizer's slots, in its "
           "order.")
      .def_prop_ro("skipped_updates", &PyDeviceTable::SkippedUpdates,
                   "Row updates left out so far because of gradients that are not finite. Waits for all that "
                   "was queued.")
      .def("zeroed", &PyDeviceTable::Zeroed, nb::arg("keys").noconvert(), nb::arg("out").noconvert(),
           "stream"_a = 0,
           "Writes to out, bool (n), which rows an optimizer's penalty has zeroed, or an import brought as "
           "zeros.")
      .def_prop_ro("zeroed_rows", &PyDeviceTable::ZeroedRows,
                   "How many rows `zeroed` is true for. Waits for all that was queued.")
      .def("import_rows", &PyDeviceTable::Import, nb::arg("keys").noconvert(), "columns"_a,
           nb::arg("frequencies").noconvert() = nb::none(), nb::arg("versions").noconvert() = nb::none(),
           "stream"_a = 0, nb::kw_only(), nb::arg("scores").noconvert() = nb::none(),
           "Writes rows with their stamps, uint32 (n), as an export gave them. scores: uint64 (n), for a "
           "bounded table; "
           "None: 'lru' starts from the versions as seconds, 'lfu' from the frequencies.")
      .def("scores", &PyDeviceTable::Scores, nb::arg("keys").noconvert(), nb::arg("out").noconvert(),
           "stream"_a = 0,
           "Reads the score of each key's row, uint64 (n); zeros where a key is missing, or the table is not "
           "bounded.")
      .def("set_scores", &PyDeviceTable::SetScores, nb::arg("keys").noconvert(),
           nb::arg("scores").noconvert(), "stream"_a = 0,
           "Sets the scores, uint64 (n), of the keys that are there; of equal keys the last wins. Raises "
           "RuntimeError "
           "unless the table evicts by 'custom'.")
      .def("set_epoch", &PyDeviceTable::SetEpoch, "epoch"_a,
           "Sets the epoch of the operations to come: rows last touched in a lower one are evicted first. "
           "Raises "
           "RuntimeError unless the table evicts by 'epoch_lru' or 'epoch_lfu'.")
      .def("remove", &PyDeviceTable::Remove, nb::arg("keys").noconvert(),
           nb::arg("removed").noconvert() = nb::none(), "stream"_a = 0,
           "Removes keys; those that are not there are ignored. Writes to removed, uint64 (1), how many were "
           "there.")
      .def(
          "remove_if",
          [](PyDeviceTable& self, nb::handle frequency, nb::handle version, nb::handle score, nb::handle key,
             const nb::int_& key_mask, const std::optional<kvtable::Output>& removed, uintptr_t stream) {
            self.RemoveIf(kvtable::PredicateOf(frequency, version, score, key, key_mask), removed, stream);
          },
          nb::kw_only(), "frequency"_a = nb::none(), "version"_a = nb::none(), "score"_a = nb::none(),
          "key"_a = nb::none(), "key_mask"_a = -1, nb::arg("removed").noconvert() = nb::none(),
          "stream"_a = 0,
          ("Removes the rows that are meant, and writes to removed, uint64 (1), how many. " + predicate_doc +
           "\n\n"
           ">>> table = DeviceTable('int64', 'float32', 1, device='threads')\n"
           ">>> table.upsert(np.array([5, 6]), np.zeros((2, 1), np.float32), version=3)\n"
           ">>> table.remove_if(version=(None, 3), key=(6, None))\n"
           ">>> len(table)\n"
           "1\n")
              .c_str())
      .def(
          "move_hot_rows", &PyDeviceTable::MoveHotRows, "most"_a, "stream"_a = 0,
          "Lets up to so many rows in host memory change places with rows in device memory that were touched "
          "longer "
          "ago, the last touched first. It reads the whole index: call it when traffic changed.")
      .def("in_device_memory", &PyDeviceTable::InDeviceMemory, nb::arg("keys").noconvert(),
           nb::arg("out").noconvert(), "stream"_a = 0,
           "Writes to out, bool (n), whether each key has a row, and in device memory.")
      .def("shrink", &PyDeviceTable::Shrink, "rows"_a, "first"_a = "oldest", "stream"_a = 0,
           "Removes rows until so many are left, first the 'oldest' (by version, then frequency) or the "
           "'least_frequent' (by frequency, then version); of equal ones those with the lowest keys, "
           "unsigned.")
      .def("clear", &PyDeviceTable::Clear, "stream"_a = 0,
           "Removes all rows, and keeps the memory for others.")
      .def("reserve", &PyDeviceTable::Reserve, "rows"_a, "batch"_a = 0, "stream"_a = 0,
           "Makes room for rows in all, and for batches of so many keys.")
      .def(
          "export",
          [](nb::object self, nb::handle frequency, nb::handle version, nb::handle score, nb::handle key,
             const nb::int_& key_mask) {
            const kvtable::RowPredicate predicate =
                kvtable::PredicateOf(frequency, version, score, key, key_mask);
            return PyDeviceExporter{self, nb::cast<PyDeviceTable*>(self)->Export(predicate)};
          },
          nb::kw_only(), "frequency"_a = nb::none(), "version"_a = nb::none(), "score"_a = nb::none(),
          "key"_a = nb::none(), "key_mask"_a = -1,
          ("Begins to read the whole table in chunks, or the rows that are meant: see Exporter.next. " +
           predicate_doc)
              .c_str());
}
