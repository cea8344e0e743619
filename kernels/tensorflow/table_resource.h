// The table as a TensorFlow resource, and what every kernel needs to reach it and to check what it is given.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "background_expiry.h"
#include "gpu.h"
#include "gradient_watch.h"
#include "kvtable/lookup_parts.h"
#include "kvtable/table.h"
#include "table_cuts.h"
#include "table_policies.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "update_lock.h"

namespace kvtools {

// What a table is, known when its handle is made; the contents come with the initializer or a restore.
struct TableConfig {
  std::string name;  // of the variable, for messages
  tensorflow::DataType key_dtype = tensorflow::DT_INT64;
  tensorflow::DataType value_dtype = tensorflow::DT_FLOAT;
  int64_t dim = 0;
  int64_t capacity_hint = 0;
  int64_t max_capacity = 0;  // 0: not bounded
  kvtable::Eviction eviction = kvtable::Eviction::kLru;
  TablePolicies policies;
  int64_t max_hbm = -1;      // of a table on a GPU: bytes of its memory for rows; -1: any number
  int64_t max_memory = 0;    // bytes of memory for rows; 0: any number
  std::string spill;         // the folder of the file with the others
  int64_t parts_beside = 1;  // parts of the same variable on the same device, this one included
  bool read_only = false;    // lookups never insert
  std::shared_ptr<Gpu> gpu;  // that the table is on; null: the CPU
};

// A table that may not have been initialized yet. The pointer is replaced as a whole by an initializer or a
// restore; kernels that hold the old one finish on it.
class TableResource : public tensorflow::ResourceBase {
 public:
  explicit TableResource(TableConfig config)
      : config_(std::move(config)), expiry_(config_.policies.expiry, config_.policies.expire_every) {}

  const TableConfig& config() const { return config_; }

  std::shared_ptr<kvtable::Table> table() const { return std::atomic_load(&table_); }
  void set_table(std::shared_ptr<kvtable::Table> table);

  // The table, for a kernel whose keys and rows lie in the memory of the table's device.
  std::shared_ptr<kvtable::Table> table_there() const { return std::atomic_load(&table_there_); }

  // An empty table of this config. `stream` is of the kernel that makes it.
  std::shared_ptr<kvtable::Table> NewTable(const kvtable::Initializer& initializer,
                                           kvtable::DeviceStream stream) const;

  // Gives `table` the slots that a step of an optimizer needs, and returns their column numbers in the order
  // of `own`.
  //
  // `own` are the slots of the step. `all` has besides those of the other optimizers that were known when the
  // step was built, and `generation` counts these sets. The first step of a newer set drops what is not in
  // it: the slots of optimizers that are gone. Any other only adds what it misses, so that optimizers that
  // take turns, each in a graph or function built before the next one was known, leave each other's slots
  // alone. Throws MustWait where it would have to wait and the caller may not.
  kvtable::SlotColumns AttachSlots(kvtable::Table* table, const std::vector<kvtable::SlotSpec>& own,
                                   const std::vector<kvtable::SlotSpec>& all, int64_t generation,
                                   kvtable::ParallelFor* threads);

  // Takes all slots out of the rows of `table`. Throws MustWait as AttachSlots does.
  void DropSlots(kvtable::Table* table, kvtable::ParallelFor* threads);

  // Another number each time: seeds the draws of one batch, of its rounding or of the keys that it admits. Saves
  // have how many there were, so that a run that is restored goes on drawing where it stopped.
  uint64_t NextSeed() { return draws_.fetch_add(1, std::memory_order_relaxed); }
  uint64_t draws() const { return draws_.load(std::memory_order_relaxed); }
  void set_draws(uint64_t draws) { draws_.store(draws, std::memory_order_relaxed); }

  // Whether it is the first time that this is asked.
  bool IsFirstWarning() { return !warned_.exchange(true); }

  // What an update holds that reads rows and writes them back in two ops.
  std::shared_ptr<UpdateLock> update_lock() const { return update_lock_; }

  // What training steps measure of their gradients.
  GradientWatch* gradients() { return &gradients_; }

  // After an update of the table, as a kernel has it: goes on with expiry beside training, where that is wanted.
  void AfterUpdate(const std::shared_ptr<kvtable::Table>& table, kvtable::ParallelFor& threads) {
    if (config_.policies.expire_every > 0 && !config_.read_only) {
      expiry_.AfterUpdate(table, config_.gpu != nullptr, threads);
    }
  }

  // What waits to be written.
  TableCuts* cuts() { return &cuts_; }

  std::string DebugString() const override { return "key-value table of " + config_.name; }
  int64_t MemoryUsed() const override;

 private:
  std::unique_lock<std::mutex> LockSlots(const kvtable::ParallelFor& threads);

  const TableConfig config_;
  std::shared_ptr<kvtable::Table> table_;
  std::shared_ptr<kvtable::Table> table_there_;
  const std::shared_ptr<UpdateLock> update_lock_ = std::make_shared<UpdateLock>();
  TableCuts cuts_;
  GradientWatch gradients_;
  BackgroundExpiry expiry_;
  std::mutex slots_mu_;
  std::atomic<uint64_t> draws_{0};
  std::atomic<bool> warned_{false};
  int64_t slots_generation_ = 0;  // the newest that `table_` was given; guarded by slots_mu_
};

// The table behind an input, initialized; FailedPrecondition naming the variable where it is not. Of a table
// in a GPU's memory it is what takes arrays where the kernel has them: on the device, unless all of its
// inputs and outputs are registered as HostMemory.
absl::Status LookupTable(tensorflow::OpKernelContext* ctx, int input,
                         tensorflow::core::RefCountPtr<TableResource>* resource,
                         std::shared_ptr<kvtable::Table>* table);

// Checks that a tensor has the dtype that the variable's keys have.
absl::Status CheckKeys(const TableConfig& config, const tensorflow::Tensor& keys);

// Checks that keys of the variable may be taken for those of an output.
absl::Status CheckKeyType(const TableConfig& config, tensorflow::DataType output);

// What a lookup of `mode` ("train", "zeros" or "initial") does with missing keys.
kvtable::MissingKeys MissingKeysOf(const std::string& mode, TableResource* resource);

// How an optimizer, or who adds to rows, stamps those of `config`'s table, each occurrence of a key counting
// `frequency`. Where a table does not admit every key, they make no rows.
kvtable::Stamp UpdateStamp(const TableConfig& config, uint32_t frequency);

// Has keys of a table whose updates count, and not its lookups, admitted before the update. For other tables it
// does nothing.
absl::Status AdmitUpdated(tensorflow::OpKernelContext* ctx, TableResource* resource, kvtable::Table* table,
                          const tensorflow::Tensor& keys, kvtable::ParallelFor* threads);

// The keys of a tensor, widened, wherever it lies.
std::vector<uint64_t> WidenedKeys(tensorflow::OpKernelContext* ctx, const TableConfig& config,
                                  const void* keys, int64_t count, kvtable::ParallelFor* threads);
inline std::vector<uint64_t> WidenedKeys(tensorflow::OpKernelContext* ctx, const TableConfig& config,
                                         const tensorflow::Tensor& keys, kvtable::ParallelFor* threads) {
  return WidenedKeys(ctx, config, keys.data(), keys.NumElements(), threads);
}

// Refuses a training lookup of more different keys than a bounded table, or this part of one in so many, has room
// for: its rows would evict one another, and the update after it would begin anew.
absl::Status CheckFits(tensorflow::OpKernelContext* ctx, const TableConfig& config,
                       const kvtable::MissingKeys& missing, const void* keys, int64_t n, int64_t parts,
                       kvtable::ParallelFor* threads);

// Whether `dtype` is float32, and the variable's rows are of 16 bits.
bool IsWidened(const TableConfig& config, tensorflow::DataType dtype);

// Checks that a tensor holds `width` values of the variable's dtype for each key of as many as the shape `keys`
// has; or, where that may be, values as IsWidened has it.
absl::Status CheckRows(const TableConfig& config, const char* what, const tensorflow::TensorShape& keys,
                       const tensorflow::Tensor& rows, int64_t width, bool may_be_widened = false);

kvtable::KeyType ToKeyType(tensorflow::DataType dtype);
kvtable::ValueType ToValueType(tensorflow::DataType dtype);

// Now, for the version column: seconds since 1970.
uint32_t UnixTime();

// The rows of an initializer of kind `rows`: an (M, dim) tensor, and back.
void SetInitializerRows(const tensorflow::Tensor& rows, kvtable::Initializer* initializer);

}  // namespace kvtools
