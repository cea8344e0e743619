// kvtools._device_table: tables in device memory for Python, over arrays of any library that speaks DLPack
// (CuPy, PyTorch; NumPy for tables on the CPU's threads), without copies.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

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

class PyDeviceTable {
 public:
  PyDeviceTable(nb::handle key_dtype, nb::handle value_dtype, int64_t dim, const std::string& device,
                nb::handle initializer, nb::handle slots, int64_t capacity_hint,
                std::optional<int64_t> max_hbm, const std::string& name)
      : is_cuda_(device == "cuda") {
    if (device != "cuda" && device != "threads")
      ThrowValue("device is '" + device + "'; expected 'cuda' or 'threads'.");
    options_.name = name;
    options_.key_type = KeyTypeOf(NameOfDtype(key_dtype));
    options_.value_type = ValueTypeOf(NameOfDtype(value_dtype));
    options_.dim = dim;
    options_.initializer =
        InitializerOf(initializer, options_.value_type, DtypeNamed(NameOfDtype(value_dtype)), dim);
    if (!slots.is_none()) options_.slots = SlotsOf(slots);
    options_.capacity_hint = capacity_hint;
    if (max_hbm.has_value()) options_.max_hbm = *max_hbm;
    nb::gil_scoped_release released;
    if (is_cuda_) {
      table_ = MakeCudaTable(options_);
    } else {
      pool_ = MakeThreadPool(2);
      table_ = MakeThreadsTable(options_, pool_.get());
    }
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
                      const std::optional<Output>& inserted, bool distinct, uintptr_t stream) {
    const DeviceKeys batch = Keys(keys, distinct);
    Check("out", out, DtypeOf(options_.value_type), {batch.n, options_.dim});
    bool* const flags = Flags("inserted", inserted, batch.n);
    nb::gil_scoped_release released;
    table_->GatherOrInsert(batch, out.data(), {frequency, version}, flags, Stream(stream));
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

  void SpreadGradient(const Input& splits, const Input& gradient, const Output& out,
                      const std::string& combiner, const std::optional<Input>& weights, uintptr_t stream) {
    const int64_t n = out.ndim() > 0 ? static_cast<int64_t>(out.shape(0)) : -1;
    const DeviceBags bags = BagsOf(splits, combiner, weights, n);
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
    std::vector<int> columns;
    for (const std::string& slot : slots) columns.push_back(ColumnNamed(slot).first);
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
              const std::optional<Input>& versions, uintptr_t stream) {
    const DeviceKeys batch = Keys(keys, false);
    const std::vector<ColumnIn> in = InputColumns(columns, batch.n);
    const auto stamps = [&](const char* what, const std::optional<Input>& array) -> const uint32_t* {
      if (!array.has_value()) return nullptr;
      Check(what, *array, nb::dtype<uint32_t>(), {batch.n});
      return static_cast<const uint32_t*>(array->data());
    };
    const uint32_t* const freqs = stamps("frequencies", frequencies);
    const uint32_t* const stamped = stamps("versions", versions);
    nb::gil_scoped_release released;
    table_->Import(batch, in, freqs, stamped, nullptr, Stream(stream));
  }

  void Remove(const Input& keys, uintptr_t stream) {
    const DeviceKeys batch = Keys(keys, false);
    nb::gil_scoped_release released;
    table_->Remove(batch, Stream(stream));
  }

  void RemoveIf(const std::string& column, const std::string& test, uint32_t bound, uintptr_t stream) {
    const RowPredicate predicate = Predicate(column, test, bound);
    nb::gil_scoped_release released;
    table_->RemoveIf(predicate, Stream(stream));
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

  std::unique_ptr<DeviceExporter> Export(const std::optional<std::string>& column, const std::string& test,
                                         uint32_t bound) {
    const RowPredicate predicate = column.has_value() ? Predicate(*column, test, bound) : RowPredicate{};
    nb::gil_scoped_release released;
    return table_->Export(predicate);
  }

  int64_t ExportNext(DeviceExporter* exporter, const Output& keys, const nb::dict& columns,
                     const std::optional<Output>& frequencies, const std::optional<Output>& versions,
                     uintptr_t stream) {
    DeviceExporter::Buffers out;
    const int64_t capacity = keys.ndim() == 1 ? static_cast<int64_t>(keys.shape(0)) : -1;
    Check("keys", keys, DtypeOf(options_.key_type), {capacity});
    out.keys = keys.data();
    const auto stamps = [&](const char* what, const std::optional<Output>& array) -> uint32_t* {
      if (!array.has_value()) return nullptr;
      Check(what, *array, nb::dtype<uint32_t>(), {capacity});
      return static_cast<uint32_t*>(array->data());
    };
    out.freqs = stamps("frequencies", frequencies);
    out.versions = stamps("versions", versions);
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

  static Missing MissingOf(const std::string& missing) {
    if (missing != "zeros" && missing != "initial") {
      ThrowValue("missing is '" + missing + "'; expected 'zeros' or 'initial'.");
    }
    return missing == "zeros" ? Missing::kZeros : Missing::kInitial;
  }

  // By name: "value", or a slot's.
  std::pair<int, int64_t> ColumnNamed(const std::string& name) const {
    if (name == "value") return {0, options_.dim};
    for (size_t s = 0; s < options_.slots.size(); ++s) {
      if (options_.slots[s].name == name) return {static_cast<int>(s) + 1, options_.slots[s].width};
    }
    std::string have = "'value'";
    for (const SlotSpec& slot : options_.slots) have += ", '" + slot.name + "'";
    ThrowValue("The table has no column '" + name + "'; it has " + have + ".");
  }

  std::vector<ColumnOut> Columns(const nb::dict& columns, int64_t n) const {
    std::vector<ColumnOut> out;
    for (auto [key, value] : columns) {
      const std::string name = kvtable::TextOf(key);
      const auto [column, width] = ColumnNamed(name);
      const Output array = nb::cast<Output>(value, false);
      Check(name.c_str(), array, DtypeOf(options_.value_type), {n, width});
      out.push_back({column, array.data(), width});
    }
    return out;
  }

  std::vector<ColumnIn> InputColumns(const nb::dict& columns, int64_t n) const {
    std::vector<ColumnIn> in;
    for (auto [key, value] : columns) {
      const std::string name = kvtable::TextOf(key);
      const auto [column, width] = ColumnNamed(name);
      const Input array = nb::cast<Input>(value, false);
      Check(name.c_str(), array, DtypeOf(options_.value_type), {n, width});
      in.push_back({column, array.data(), width});
    }
    return in;
  }

  static RowPredicate Predicate(const std::string& column, const std::string& test, uint32_t bound) {
    const bool below = test == "below";
    if ((column != "frequency" && column != "version") || (!below && test != "at_least")) {
      ThrowValue("The rows where '" + column + "' is '" + test +
                 "'; expected 'frequency' or 'version', and 'below' or 'at_least'.");
    }
    if (column == "frequency") {
      return {below ? RowPredicate::Test::kFrequencyBelow : RowPredicate::Test::kFrequencyAtLeast, bound};
    }
    return {below ? RowPredicate::Test::kVersionBelow : RowPredicate::Test::kVersionAtLeast, bound};
  }

  const bool is_cuda_;
  DeviceTableOptions options_;
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

  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const kvtable::Error& e) {
      PyObject* const type = e.code() == kvtable::ErrorCode::kInvalidArgument     ? PyExc_ValueError
                             : e.code() == kvtable::ErrorCode::kResourceExhausted ? PyExc_MemoryError
                                                                                  : PyExc_RuntimeError;
      PyErr_SetString(type, e.what());
    }
  });

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
             const std::optional<kvtable::Output>& versions, uintptr_t stream) {
            return nb::cast<PyDeviceTable*>(self.table)
                ->ExportNext(self.exporter.get(), keys, columns, frequencies, versions, stream);
          },
          nb::arg("keys").noconvert(), "columns"_a = nb::dict(),
          nb::arg("frequencies").noconvert() = nb::none(), nb::arg("versions").noconvert() = nb::none(),
          "stream"_a = 0,
          "Writes as many rows as keys has room for, at most, and returns how many; -1 at the end. A chunk "
          "may be "
          "empty.");

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
      .def(nb::init<nb::handle, nb::handle, int64_t, const std::string&, nb::handle, nb::handle, int64_t,
                    std::optional<int64_t>, const std::string&>(),
           "key_dtype"_a, "value_dtype"_a, "dim"_a, nb::kw_only(), "device"_a = "cuda",
           "initializer"_a = nb::none(), "slots"_a = nb::none(), "capacity_hint"_a = 0,
           "max_hbm"_a = nb::none(), "name"_a = "",
           "max_hbm: bytes of rows in device memory; what is beyond lies in pinned host memory.")
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
           nb::arg("inserted").noconvert() = nb::none(), "distinct"_a = false, "stream"_a = 0,
           "Reads values into out; a missing key is inserted with its initial value, and stamped.")
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
           "rise from 0 to the number of keys, which is not checked.")
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
      .def("contains", &PyDeviceTable::Contains, nb::arg("keys").noconvert(), nb::arg("out").noconvert(),
           "stream"_a = 0, "Writes to out, bool (n), whether each key is there.")
      .def("gather_stamps", &PyDeviceTable::GatherStamps, nb::arg("keys").noconvert(),
           nb::arg("frequencies").noconvert(), nb::arg("versions").noconvert(), "stream"_a = 0,
           "Reads frequencies and versions, uint32 (n); zeros where a key is missing.")
      .def("upsert", &PyDeviceTable::Upsert, nb::arg("keys").noconvert(), nb::arg("values").noconvert(),
           "frequency"_a = 0, "version"_a = 0, "distinct"_a = false, "stream"_a = 0,
           "Writes values (n, dim); of equal keys the last wins. distinct: there are none, which saves work.")
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
           "stream"_a = 0, "Writes rows with their stamps, as an export gave them.")
      .def("remove", &PyDeviceTable::Remove, nb::arg("keys").noconvert(), "stream"_a = 0,
           "Removes keys; those that are not there are ignored.")
      .def("remove_if", &PyDeviceTable::RemoveIf, "column"_a, "test"_a, "bound"_a, "stream"_a = 0,
           "Removes the rows whose 'frequency' or 'version' is 'below' or 'at_least' a bound.")
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
          [](nb::object self, const std::optional<std::string>& column, const std::string& test,
             uint32_t bound) {
            return PyDeviceExporter{self, nb::cast<PyDeviceTable*>(self)->Export(column, test, bound)};
          },
          "column"_a = nb::none(), "test"_a = "at_least", "bound"_a = 0,
          "Begins to read the whole table in chunks, or the rows that remove_if would remove: see "
          "Exporter.next.");
}
