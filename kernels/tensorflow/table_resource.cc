#include "table_resource.h"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <mutex>
#include <unordered_set>

#include "errors.h"
#include "kvtable/device_table_view.h"
#include "kvtable/part_of.h"
#include "tensorflow/core/platform/logging.h"

namespace kvtools {

namespace tf = tensorflow;

std::shared_ptr<kvtable::Table> TableResource::NewTable(const kvtable::Initializer& initializer,
                                                        kvtable::DeviceStream stream) const {
  const auto fill = [&](auto* options) {
    options->key_type = ToKeyType(config_.key_dtype);
    options->value_type = ToValueType(config_.value_dtype);
    options->dim = config_.dim;
    options->initializer = initializer;
    options->capacity_hint = config_.capacity_hint;
    options->max_capacity = config_.max_capacity;
    options->eviction = config_.eviction;
    options->padding_key = config_.policies.padding_key;
    // What serves a model has it as it was saved.
    if (!config_.read_only) options->expiry = kvtable::ExpiryOf(config_.policies.expiry);
  };
  const auto admitter = [&]() -> std::shared_ptr<kvtable::Admitter> {
    return config_.read_only ? nullptr : kvtable::Admitter::Create(config_.policies.admission);
  };
  if (config_.gpu == nullptr) {
    kvtable::TableOptions options;
    fill(&options);
    options.max_memory = config_.max_memory;
    options.spill = config_.spill;
    options.parts_beside = config_.parts_beside;
    options.name = config_.name;
    std::shared_ptr<kvtable::Table> table = kvtable::Table::Create(options);
    table->set_admitter(admitter());
    return table;
  }
  if (config_.max_memory > 0) {
    throw kvtable::Error(
        kvtable::ErrorCode::kInvalidArgument,
        "Table '" + config_.name + "' is on a GPU, and max_memory= and spill='" + config_.spill +
            "' are of tables on a CPU. Make it under tf.device('CPU:0'), or bound its rows in the "
            "GPU's memory by max_hbm=.");
  }
  kvtable::DeviceTableOptions options;
  fill(&options);
  options.name = config_.name;
  if (config_.max_hbm >= 0) options.max_hbm = config_.max_hbm;
  options.allocator = config_.gpu->memory();
  options.stream = stream;
  // Whoever holds the table holds the GPU that it has its memory from.
  struct GpuTable {
    std::shared_ptr<Gpu> gpu;
    std::unique_ptr<kvtable::DeviceTable> table;
  };
  auto made = std::make_shared<GpuTable>(GpuTable{config_.gpu, kvtable::Devices().table(options)});
  std::shared_ptr<kvtable::DeviceTable> table(made, made->table.get());
  std::shared_ptr<kvtable::DeviceWork> work(config_.gpu, config_.gpu->work());
  std::shared_ptr<kvtable::Table> view =
      kvtable::ViewOf(std::move(table), std::move(work), kvtable::ArraysIn::kHost);
  view->set_admitter(admitter());
  return view;
}

void TableResource::set_table(std::shared_ptr<kvtable::Table> table) {
  std::lock_guard<std::mutex> lock(slots_mu_);
  slots_generation_ = 0;
  std::atomic_store(&table_there_, kvtable::ViewInPlace(table));
  std::atomic_store(&table_, std::move(table));
}

namespace {

const kvtable::SlotSpec* FindSlot(const std::vector<kvtable::SlotSpec>& slots, const std::string& name) {
  const auto at =
      std::find_if(slots.begin(), slots.end(), [&](const auto& slot) { return slot.name == name; });
  return at == slots.end() ? nullptr : &*at;
}

}  // namespace

std::unique_lock<std::mutex> TableResource::LockSlots(const kvtable::ParallelFor& threads) {
  std::unique_lock<std::mutex> lock(slots_mu_, std::defer_lock);
  if (threads.may_wait()) {
    lock.lock();
  } else if (!lock.try_lock()) {  // who has it may be waiting
    throw kvtable::MustWait();
  }
  return lock;
}

void TableResource::DropSlots(kvtable::Table* table, kvtable::ParallelFor* threads) {
  const std::unique_lock<std::mutex> lock = LockSlots(*threads);
  table->EnsureSlots({}, *threads);
}

kvtable::SlotColumns TableResource::AttachSlots(kvtable::Table* table,
                                                const std::vector<kvtable::SlotSpec>& own,
                                                const std::vector<kvtable::SlotSpec>& all, int64_t generation,
                                                kvtable::ParallelFor* threads) {
  std::vector<kvtable::SlotSpec> slots;
  kvtable::SlotColumns columns;
  {
    const std::unique_lock<std::mutex> lock = LockSlots(*threads);
    const bool newer = generation > slots_generation_;
    // Slots that stay keep their places, so that nothing moves when nothing changes.
    const std::vector<kvtable::SlotSpec> before = table->slots();
    for (const kvtable::SlotSpec& slot : before) {
      const kvtable::SlotSpec* wanted = FindSlot(newer ? all : own, slot.name);
      if (wanted != nullptr) {
        slots.push_back(*wanted);
      } else if (!newer) {
        slots.push_back(slot);
      }
    }
    for (const kvtable::SlotSpec& slot : newer ? all : own) {
      if (FindSlot(before, slot.name) == nullptr) slots.push_back(slot);
    }
    std::string dropped;
    for (const kvtable::SlotSpec& slot : before) {
      if (FindSlot(slots, slot.name) == nullptr) dropped += (dropped.empty() ? "" : ", ") + slot.name;
    }
    columns.generation = table->EnsureSlots(slots, *threads);
    if (!dropped.empty() && table->Size() > 0) {
      LOG(WARNING) << "Key-value variable '" << config_.name
                   << "' drops the slots of optimizers that are gone: " << dropped
                   << ". Those that came instead start fresh.";
    }
    if (newer && (table == table_.get() || table == table_there_.get())) slots_generation_ = generation;
  }
  for (const kvtable::SlotSpec& slot : own) {
    columns.columns.push_back(static_cast<int>(FindSlot(slots, slot.name) - slots.data()) + 1);
  }
  return columns;
}

int64_t TableResource::MemoryUsed() const {
  const auto current = table();
  if (current == nullptr) return 0;
  try {
    const kvtable::MemoryUse use = current->Memory();
    return use.row_bytes + use.index_bytes + use.column_bytes + use.slack_bytes;
  } catch (...) {  // TensorFlow asks outside of any op: there is nobody to tell
    return 0;
  }
}

namespace {

// Whether all of a kernel's inputs and outputs lie in host memory.
bool IsOnHost(tf::OpKernelContext* ctx) {
  for (int i = 0; i < ctx->num_inputs(); ++i) {
    if (ctx->input_memory_type(i) == tf::DEVICE_MEMORY) return false;
  }
  for (int i = 0; i < ctx->num_outputs(); ++i) {
    if (ctx->output_memory_type(i) == tf::DEVICE_MEMORY) return false;
  }
  return true;
}

}  // namespace

absl::Status LookupTable(tf::OpKernelContext* ctx, int input, tf::core::RefCountPtr<TableResource>* resource,
                         std::shared_ptr<kvtable::Table>* table) {
  const tf::ResourceHandle& handle = tf::HandleFromInput(ctx, input);
  const absl::Status found = tf::LookupResource(ctx, handle, resource);
  if (!found.ok()) {
    // The handle of an anonymous table has the table with it, where it has not been through another process.
    if (handle.container() == "Anonymous") {
      return errors::FailedPrecondition("Key-value variable '", handle.name(), "' is in one process, on ",
                                        handle.device(),
                                        ", and another one wants its rows: make it in the scope of the "
                                        "strategy (strategy.scope()), so that its "
                                        "rows are on servers that all workers reach.");
    }
    return errors::FailedPrecondition("The key-value variable behind resource '", handle.name(),
                                      "' does not exist in this session: run its initializer or restore a "
                                      "checkpoint first. (",
                                      found.message(), ")");
  }
  const bool there = (*resource)->config().gpu != nullptr && !IsOnHost(ctx);
  *table = there ? (*resource)->table_there() : (*resource)->table();
  if (*table == nullptr) {
    return errors::FailedPrecondition(
        "Key-value variable '", (*resource)->config().name,
        "' is not initialized: run its initializer (tf.global_variables_initializer) "
        "or restore a checkpoint first.");
  }
  return absl::OkStatus();
}

absl::Status CheckKeys(const TableConfig& config, const tf::Tensor& keys) {
  if (keys.dtype() == config.key_dtype) return absl::OkStatus();
  return errors::InvalidArgument("Key-value variable '", config.name, "' has ",
                                 tf::DataTypeString(config.key_dtype), " keys, got ",
                                 tf::DataTypeString(keys.dtype()), ": cast the ids.");
}

absl::Status CheckKeyType(const TableConfig& config, tf::DataType output) {
  if (output == config.key_dtype) return absl::OkStatus();
  return errors::InvalidArgument("Key-value variable '", config.name, "' has ",
                                 tf::DataTypeString(config.key_dtype), " keys, wanted ",
                                 tf::DataTypeString(output));
}

namespace {

// Says so, once, where the filter of a table's admission has more keys than it was made for.
void WarnIfOverfull(TableResource* resource) {
  const kvtable::AdmissionPolicy& admission = resource->config().policies.admission;
  if (admission.kind != kvtable::AdmissionPolicy::Kind::kBloom) return;
  const std::shared_ptr<kvtable::Table> table = resource->table();
  if (table == nullptr || table->admitter() == nullptr || !table->admitter()->is_overfull()) return;
  if (!resource->IsFirstWarning()) return;
  LOG(WARNING) << "The admission filter of key-value variable '" << resource->config().name
               << "' has counted more different keys than its capacity of " << admission.capacity
               << ": keys are admitted too early more often than its error says. Build the variable with "
                  "BloomAdmission of a larger capacity.";
}

}  // namespace

kvtable::MissingKeys MissingKeysOf(const std::string& mode, TableResource* resource) {
  const TableConfig& config = resource->config();
  const kvtable::AdmissionPolicy& admission = config.policies.admission;
  kvtable::MissingKeys missing;
  missing.insert = mode == "train" && !config.read_only;
  missing.missing = mode == "initial" ? kvtable::Missing::kInitial : kvtable::Missing::kZeros;
  missing.stamp = {0, UnixTime()};
  if (admission.on_update) {  // so that lookups insert nothing
    if (missing.insert) missing.missing = admission.below;
    missing.insert = false;
  } else if (!admission.admits_all()) {
    missing.below = admission.below;
    missing.admission = admission.probability;
    if (missing.insert && admission.probability != 1.0) missing.admission_seed = resource->NextSeed();
    if (missing.insert) WarnIfOverfull(resource);
  }
  return missing;
}

kvtable::Stamp UpdateStamp(const TableConfig& config, uint32_t frequency) {
  kvtable::Stamp stamp{frequency, UnixTime()};
  stamp.existing_only = !config.policies.admission.admits_all();
  return stamp;
}

absl::Status AdmitUpdated(tf::OpKernelContext* ctx, TableResource* resource, kvtable::Table* table,
                          const tf::Tensor& keys, kvtable::ParallelFor* threads) {
  const TableConfig& config = resource->config();
  const kvtable::AdmissionPolicy& admission = config.policies.admission;
  if (!admission.on_update || keys.NumElements() == 0) return absl::OkStatus();
  tf::Tensor rows;
  TF_RETURN_IF_ERROR(
      ctx->allocate_temp(config.value_dtype, tf::TensorShape({keys.NumElements(), config.dim}), &rows));
  kvtable::Insertion insertion;
  insertion.stamp = {0, UnixTime()};
  insertion.admission = admission.probability;
  if (admission.probability != 1.0) insertion.admission_seed = resource->NextSeed();
  insertion.admitter = table->admitter().get();
  table->GatherOrInsert(keys.data(), keys.NumElements(), rows.data(), insertion, *threads);
  return absl::OkStatus();
}

std::vector<uint64_t> WidenedKeys(tf::OpKernelContext* ctx, const TableConfig& config, const void* keys,
                                  int64_t count, kvtable::ParallelFor* threads) {
  const size_t n = static_cast<size_t>(count);
  std::vector<uint64_t> wide(n);
  const bool narrow = config.key_dtype == tf::DT_INT32;
  std::vector<int32_t> half(narrow ? n : 0);
  void* const to = narrow ? static_cast<void*>(half.data()) : wide.data();
  const size_t bytes = n * (narrow ? sizeof(int32_t) : sizeof(uint64_t));
  if (config.gpu != nullptr && !IsOnHost(ctx)) {
    config.gpu->work()->Copy(to, keys, bytes, threads->stream());
  } else if (bytes > 0) {
    std::memcpy(to, keys, bytes);
  }
  for (size_t i = 0; i < half.size(); ++i) wide[i] = static_cast<uint64_t>(int64_t{half[i]});
  return wide;
}

absl::Status CheckFits(tf::OpKernelContext* ctx, const TableConfig& config,
                       const kvtable::MissingKeys& missing, const void* keys, int64_t n, int64_t parts,
                       kvtable::ParallelFor* threads) {
  // Keys that wait to be admitted take no row.
  if (!missing.insert || config.max_capacity == 0 || n <= config.max_capacity) return absl::OkStatus();
  if (!config.policies.admission.admits_all()) return absl::OkStatus();
  std::vector<std::unordered_set<uint64_t>> of_part(static_cast<size_t>(parts));
  const kvtable::PartOf<int64_t> part_of(parts);
  const kvtable::PartOf<uint64_t> part_of_unsigned(parts);
  for (const uint64_t key : WidenedKeys(ctx, config, keys, n, threads)) {
    const int64_t part =
        config.key_dtype == tf::DT_UINT64 ? part_of_unsigned(key) : part_of(static_cast<int64_t>(key));
    of_part[static_cast<size_t>(part)].insert(key);
  }
  for (const std::unordered_set<uint64_t>& own : of_part) {
    if (static_cast<int64_t>(own.size()) <= config.max_capacity) continue;
    return errors::InvalidArgument(
        "Key-value variable '", config.name, "' keeps ", config.max_capacity, " rows (max_capacity",
        parts > 1 ? ", of each part" : "", "), and a training lookup has ", own.size(),
        " different keys for it: they would evict one another. Nothing was changed. Build it with a "
        "max_capacity of "
        "several batches, or look up fewer keys at a time (sparse_read_and_evict takes any number).");
  }
  return absl::OkStatus();
}

bool IsWidened(const TableConfig& config, tf::DataType dtype) {
  return dtype == tf::DT_FLOAT &&
         (config.value_dtype == tf::DT_HALF || config.value_dtype == tf::DT_BFLOAT16);
}

absl::Status CheckRows(const TableConfig& config, const char* what, const tf::TensorShape& keys,
                       const tf::Tensor& rows, int64_t width, bool may_be_widened) {
  if (rows.dtype() != config.value_dtype && !(may_be_widened && IsWidened(config, rows.dtype()))) {
    return errors::InvalidArgument("Key-value variable '", config.name, "' holds ",
                                   tf::DataTypeString(config.value_dtype), ", got ", what, " of ",
                                   tf::DataTypeString(rows.dtype()));
  }
  tf::TensorShape expected = keys;
  TF_RETURN_IF_ERROR(expected.AddDimWithStatus(width));
  const bool flat = rows.dims() == 2 && rows.dim_size(0) == keys.num_elements() && rows.dim_size(1) == width;
  if (rows.shape() != expected && !flat) {
    return errors::InvalidArgument("Key-value variable '", config.name, "' wants ", what, " of shape ",
                                   expected.DebugString(), " for keys of shape ", keys.DebugString(),
                                   ", got ", rows.shape().DebugString());
  }
  return absl::OkStatus();
}

kvtable::KeyType ToKeyType(tf::DataType dtype) {
  switch (dtype) {
    case tf::DT_INT32:
      return kvtable::KeyType::kInt32;
    case tf::DT_UINT64:
      return kvtable::KeyType::kUint64;
    default:
      return kvtable::KeyType::kInt64;
  }
}

kvtable::ValueType ToValueType(tf::DataType dtype) {
  switch (dtype) {
    case tf::DT_HALF:
      return kvtable::ValueType::kFloat16;
    case tf::DT_BFLOAT16:
      return kvtable::ValueType::kBFloat16;
    case tf::DT_DOUBLE:
      return kvtable::ValueType::kFloat64;
    case tf::DT_INT8:
      return kvtable::ValueType::kInt8;
    case tf::DT_INT32:
      return kvtable::ValueType::kInt32;
    case tf::DT_INT64:
      return kvtable::ValueType::kInt64;
    case tf::DT_BOOL:
      return kvtable::ValueType::kBool;
    default:
      return kvtable::ValueType::kFloat32;
  }
}

uint32_t UnixTime() { return static_cast<uint32_t>(std::time(nullptr)); }

void SetInitializerRows(const tf::Tensor& rows, kvtable::Initializer* initializer) {
  const auto bytes = rows.tensor_data();
  initializer->rows = std::make_shared<const std::vector<char>>(bytes.begin(), bytes.end());
  initializer->num_rows = rows.dim_size(0);
}

}  // namespace kvtools
