#include "table_resource.h"

#include <algorithm>
#include <condition_variable>
#include <ctime>
#include <exception>
#include <mutex>
#include <new>
#include <stdexcept>

#include "errors.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/platform/threadpool.h"

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
  };
  if (config_.gpu == nullptr) {
    kvtable::TableOptions options;
    fill(&options);
    return kvtable::Table::Create(options);
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
  return kvtable::ViewOf(std::move(table), std::move(work), kvtable::ArraysIn::kHost);
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

kvtable::SlotColumns TableResource::AttachSlots(kvtable::Table* table,
                                                const std::vector<kvtable::SlotSpec>& own,
                                                const std::vector<kvtable::SlotSpec>& all, int64_t generation,
                                                kvtable::ParallelFor* threads) {
  std::vector<kvtable::SlotSpec> slots;
  kvtable::SlotColumns columns;
  {
    std::lock_guard<std::mutex> lock(slots_mu_);
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
  const kvtable::MemoryUse use = current->Memory();
  return use.row_bytes + use.index_bytes + use.column_bytes + use.slack_bytes;
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

KernelThreads::KernelThreads(tf::OpKernelContext* ctx)
    : pool_(ctx->device()->tensorflow_cpu_worker_threads()->workers),
      threads_(std::max(1, ctx->device()->tensorflow_cpu_worker_threads()->num_threads)),
      stream_(StreamOf(ctx)) {}

void KernelThreads::Run(int64_t tasks, const std::function<void(int64_t)>& body) {
  if (tasks <= 1 || threads_ == 1) {
    for (int64_t i = 0; i < tasks; ++i) body(i);
    return;
  }
  // Workers and the caller draw task numbers from one counter. The caller waits only for workers that have
  // drawn one, so it never hangs on a pool whose threads are all busy. A worker that starts late finds the
  // counter used up and touches nothing but the shared state.
  struct State {
    std::atomic<int64_t> next{0};
    std::mutex mu;
    std::condition_variable done;
    int64_t finished = 0;
    std::exception_ptr error;
  };
  auto state = std::make_shared<State>();
  auto work = [state, tasks](const std::function<void(int64_t)>* fn) {
    int64_t ran = 0;
    std::exception_ptr error;
    for (int64_t i = state->next.fetch_add(1); i < tasks; i = state->next.fetch_add(1)) {
      try {
        (*fn)(i);
      } catch (...) {
        error = std::current_exception();
      }
      ++ran;
    }
    if (ran == 0) return;
    std::lock_guard<std::mutex> lock(state->mu);
    state->finished += ran;
    if (error != nullptr) state->error = error;
    if (state->finished == tasks) state->done.notify_all();
  };
  const int64_t workers = std::min<int64_t>(threads_, tasks) - 1;
  for (int64_t w = 0; w < workers; ++w) pool_->Schedule([work, fn = &body] { work(fn); });
  work(&body);
  std::unique_lock<std::mutex> lock(state->mu);
  state->done.wait(lock, [&] { return state->finished == tasks; });
  if (state->error != nullptr) std::rethrow_exception(state->error);
}

absl::Status LookupTable(tf::OpKernelContext* ctx, int input, tf::core::RefCountPtr<TableResource>* resource,
                         std::shared_ptr<kvtable::Table>* table) {
  const tf::ResourceHandle& handle = tf::HandleFromInput(ctx, input);
  const absl::Status found = tf::LookupResource(ctx, handle, resource);
  if (!found.ok()) {
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

kvtable::MissingKeys MissingKeysOf(const std::string& mode, const TableConfig& config) {
  kvtable::MissingKeys missing;
  missing.insert = mode == "train" && !config.read_only;
  missing.missing = mode == "initial" ? kvtable::Missing::kInitial : kvtable::Missing::kZeros;
  missing.stamp = {0, UnixTime()};
  return missing;
}

absl::Status CheckRows(const TableConfig& config, const char* what, const tf::Tensor& keys,
                       const tf::Tensor& rows, int64_t width) {
  if (rows.dtype() != config.value_dtype) {
    return errors::InvalidArgument("Key-value variable '", config.name, "' holds ",
                                   tf::DataTypeString(config.value_dtype), ", got ", what, " of ",
                                   tf::DataTypeString(rows.dtype()));
  }
  tf::TensorShape expected = keys.shape();
  expected.AddDim(width);
  const bool flat = rows.dims() == 2 && rows.dim_size(0) == keys.NumElements() && rows.dim_size(1) == width;
  if (rows.shape() != expected && !flat) {
    return errors::InvalidArgument("Key-value variable '", config.name, "' wants ", what, " of shape ",
                                   expected.DebugString(), " for keys of shape ", keys.shape().DebugString(),
                                   ", got ", rows.shape().DebugString());
  }
  return absl::OkStatus();
}

absl::Status CatchErrors(const std::string& doing, const std::string& name,
                         const std::function<void()>& body) {
  try {
    body();
    return absl::OkStatus();
  } catch (const kvtable::Error& e) {
    switch (e.code()) {
      case kvtable::ErrorCode::kInvalidArgument:
        return errors::InvalidArgument(doing, " key-value variable '", name, "': ", e.what());
      case kvtable::ErrorCode::kResourceExhausted:
        return errors::ResourceExhausted(doing, " key-value variable '", name, "': ", e.what());
      case kvtable::ErrorCode::kFailedPrecondition:
        return errors::FailedPrecondition(doing, " key-value variable '", name, "': ", e.what());
    }
  } catch (const std::bad_alloc&) {
    return errors::ResourceExhausted(doing, " key-value variable '", name, "': out of memory.");
  } catch (const std::invalid_argument& e) {
    return errors::InvalidArgument(doing, " key-value variable '", name, "': ", e.what());
  } catch (const std::exception& e) {
    return errors::Internal(doing, " key-value variable '", name, "': ", e.what());
  }
  return errors::Internal(doing, " key-value variable '", name, "': unknown error.");
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

namespace {

struct EvictionEntry {
  const char* name;
  kvtable::Eviction eviction;
};

constexpr EvictionEntry kEvictions[] = {{"lru", kvtable::Eviction::kLru},
                                        {"lfu", kvtable::Eviction::kLfu},
                                        {"custom", kvtable::Eviction::kCustom}};

}  // namespace

std::string EvictionName(kvtable::Eviction eviction) {
  for (const EvictionEntry& entry : kEvictions) {
    if (entry.eviction == eviction) return entry.name;
  }
  return "";
}

kvtable::Eviction EvictionNamed(const std::string& name) {
  for (const EvictionEntry& entry : kEvictions) {
    if (name == entry.name) return entry.eviction;
  }
  throw std::invalid_argument("unknown eviction '" + name + "'");
}

uint32_t UnixTime() { return static_cast<uint32_t>(std::time(nullptr)); }

std::vector<kvtable::SlotSpec> SlotsFromJson(const Json& array) {
  std::vector<kvtable::SlotSpec> slots;
  for (const Json& item : array.items()) {
    kvtable::SlotSpec slot;
    slot.name = item.String("name");
    slot.width = item.Int("width");
    const std::string& init = item.String("init");
    if (init == "copy_value") {
      slot.init = kvtable::SlotSpec::Init::kCopyValue;
    } else if (init == "constant") {
      slot.constant = item.Double("constant", 0.0);
    } else {
      throw std::invalid_argument("slot '" + slot.name + "' has unknown init '" + init + "'");
    }
    slots.push_back(std::move(slot));
  }
  return slots;
}

namespace {

struct InitializerKind {
  const char* name;
  kvtable::Initializer::Kind kind;
};

constexpr InitializerKind kInitializerKinds[] = {
    {"constant", kvtable::Initializer::Kind::kConstant},
    {"uniform", kvtable::Initializer::Kind::kUniform},
    {"normal", kvtable::Initializer::Kind::kNormal},
    {"truncated_normal", kvtable::Initializer::Kind::kTruncatedNormal},
    {"rows", kvtable::Initializer::Kind::kRows},
};

}  // namespace

kvtable::Initializer InitializerFromJson(const Json& object) {
  kvtable::Initializer initializer;
  const std::string& name = object.String("kind");
  bool known = false;
  for (const InitializerKind& entry : kInitializerKinds) {
    if (name == entry.name) {
      initializer.kind = entry.kind;
      known = true;
    }
  }
  if (!known) throw std::invalid_argument("unknown initializer kind '" + name + "'");
  initializer.a = object.Double("a", 0.0);
  initializer.b = object.Double("b", 0.0);
  if (object.Has("seed")) initializer.seed = object.Uint("seed");
  return initializer;
}

std::string SlotsToJson(const std::vector<kvtable::SlotSpec>& slots) {
  std::string out = "[";
  for (const kvtable::SlotSpec& slot : slots) {
    if (out.size() > 1) out += ", ";
    out += "{\"name\": " + JsonQuote(slot.name) + ", \"width\": " + std::to_string(slot.width);
    if (slot.init == kvtable::SlotSpec::Init::kCopyValue) {
      out += ", \"init\": \"copy_value\"}";
    } else {
      out += ", \"init\": \"constant\", \"constant\": " + JsonNumber(slot.constant) + "}";
    }
  }
  return out + "]";
}

std::string InitializerToJson(const kvtable::Initializer& initializer) {
  std::string name;
  for (const InitializerKind& entry : kInitializerKinds) {
    if (initializer.kind == entry.kind) name = entry.name;
  }
  return "{\"kind\": " + JsonQuote(name) + ", \"a\": " + JsonNumber(initializer.a) +
         ", \"b\": " + JsonNumber(initializer.b) + ", \"seed\": " + std::to_string(initializer.seed) + "}";
}

void SetInitializerRows(const tf::Tensor& rows, kvtable::Initializer* initializer) {
  const auto bytes = rows.tensor_data();
  initializer->rows = std::make_shared<const std::vector<char>>(bytes.begin(), bytes.end());
  initializer->num_rows = rows.dim_size(0);
}

}  // namespace kvtools
