// What kvtools._device_table.DeviceTable is: checks of the arrays that come by DLPack, and the calls with
// them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../cuda/threads_table.h"
#include "arguments.h"
#include "expiry_arguments.h"
#include "kvtable/device_table.h"
#include "kvtable/device_table_view.h"
#include "kvtable/parallel_for.h"

namespace kvtable {

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
                std::optional<int64_t> move_hot_rows, const std::string& name, int64_t max_age,
                const std::string& age_unit, nb::handle clock)
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
    options_.expiry = kvtable::ExpiryOf(max_age, age_unit, clock);
    options_.clock = options_.expiry.clock;
    nb::gil_scoped_release released;
    if (is_cuda_) {
      table_ = MakeCudaTable(options_);
      view_ = ViewOf(table_, MakeCudaWork(nullptr), ArraysIn::kHost);
    } else {
      pool_ = MakeThreadPool(2);
      table_ = MakeThreadsTable(options_, pool_.get());
      view_ = ViewOf(table_, MakeThreadsWork(nullptr, pool_.get()), ArraysIn::kHost);
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

  uint32_t Now() const {
    nb::gil_scoped_release released;
    return table_->Now();
  }

  void SetStep(uint32_t step) {
    nb::gil_scoped_release released;
    table_->SetStep(step);
  }

  int64_t Evict(const std::string& policy, nb::handle number, const std::string& by) {
    const EvictPolicy wanted = PolicyOf(policy, number, by);
    nb::gil_scoped_release released;
    return kvtable::Evict(view_.get(), wanted, Serial());
  }

  void BeginSweep(nb::handle policies) { sweep_ = Sweep(PoliciesOf(policies)); }

  int64_t RunSweep(int64_t rows) {
    nb::gil_scoped_release released;
    return sweep_.Run(view_.get(), rows, Serial());
  }

  int64_t EvictedRows() const {
    nb::gil_scoped_release released;
    return table_->EvictedCount();
  }

  int64_t ExpiredRows() const {
    nb::gil_scoped_release released;
    return table_->ExpiredCount();
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
  std::shared_ptr<DeviceTable> table_;
  std::shared_ptr<Table> view_;  // of the same, with the interface of those on the CPU
  Sweep sweep_{{}};
};

// Keeps its table alive.
struct PyDeviceExporter {
  nb::object table;
  std::unique_ptr<DeviceExporter> exporter;
};

}  // namespace kvtable
