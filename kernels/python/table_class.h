// What kvtools._kvtable.Table and its exporter are: the engine over NumPy arrays, without copies. The GIL is
// released while it works.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <vector>

#include "arguments.h"
#include "expiry_arguments.h"
#include "kvtable/parallel_for.h"
#include "kvtable/table.h"

namespace kvtable {

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
          bool huge_pages, int threads, int64_t max_age, const std::string& age_unit, nb::handle clock,
          nb::handle admission, nb::handle padding_key, int64_t max_memory = 0, const std::string& spill = "",
          const std::string& name = "");

  Table& table() { return *table_; }
  ParallelFor& pool() { return *pool_; }
  const Admitter* admitter() const { return table_->admitter().get(); }
  const nb::object& key_dtype() const { return key_dtype_; }
  const nb::object& value_dtype() const { return value_dtype_; }
  const nb::object& uint32_dtype() const { return uint32_dtype_; }
  const nb::object& uint64_dtype() const { return uint64_dtype_; }

  nb::object Gather(nb::handle keys, nb::handle missing, nb::object out, nb::object found,
                    nb::object positions);

  nb::object GatherOrInsert(nb::handle keys, uint32_t frequency, uint32_t version, double admission,
                            uint64_t seed, nb::object out, nb::object inserted, nb::object positions);

  nb::tuple GatherOrInsertEvicting(nb::handle keys, uint32_t frequency, uint32_t version, double admission,
                                   uint64_t seed, nb::object out, nb::object inserted, nb::object positions);

  nb::object Insert(nb::handle keys, Insertion insertion, nb::object out, const nb::object& inserted,
                    const nb::object& positions);

  nb::list GatherColumns(nb::handle keys, const nb::object& columns, const nb::object& found);

  nb::object Contains(nb::handle keys, nb::object out);

  nb::tuple GatherStamps(nb::handle keys);

  void Upsert(nb::handle keys, nb::handle values, uint32_t frequency, uint32_t version);

  void UpsertColumns(nb::handle keys, const nb::dict& columns, uint32_t frequency, uint32_t version);

  void Accumulate(nb::handle keys, nb::handle deltas, bool from_zeros, uint32_t frequency, uint32_t version);

  nb::tuple Apply(const std::string& optimizer, nb::handle keys, nb::handle gradients,
                  const nb::dict& hyperparameters, const std::vector<nb::object>& slots,
                  const nb::object& positions, bool stochastic_rounding, uint64_t seed, bool skip_nonfinite,
                  uint32_t frequency, uint32_t version);

  nb::object Zeroed(nb::handle keys);

  int64_t Remove(nb::handle keys);

  nb::object Scores(nb::handle keys);

  int64_t SetScores(nb::handle keys, nb::handle scores);

  void Import(nb::handle keys, const nb::dict& columns, const nb::object& frequencies,
              const nb::object& versions, const nb::object& scores);

  int64_t Evict(const std::string& policy, nb::handle number, const std::string& by);

  void BeginSweep(nb::handle policies) { sweep_ = Sweep(PoliciesOf(policies)); }
  int64_t RunSweep(int64_t rows) {
    nb::gil_scoped_release unlocked;
    return sweep_.Run(table_.get(), rows, *pool_);
  }

  uint64_t EnsureSlots(nb::handle specs);

  void SetInitializer(nb::handle spec);

  nb::dict GetInitializer() const;

  nb::list GetSlots() const { return ListOf(table_->slots()); }

  nb::dict Memory() const;

  // None (all), or a sequence of column numbers and slot names; 0 or "value" is the value.
  static std::vector<int> ColumnsOf(const nb::object& columns, const RowSchema& schema);

  // A new array (shape..., width of the column), its memory and its place in a lookup.
  void MakeColumn(const Shape& shape, int column, const RowSchema& schema, nb::list* arrays,
                  std::vector<std::unique_ptr<ArrayView>>* views, std::vector<ColumnOut>* outs) const;

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

  static uint64_t* PositionsOf(const std::unique_ptr<ArrayView>& positions);

  int64_t dim() const { return table_->dim(); }

  static int ColumnOf(nb::handle column, const std::vector<SlotSpec>& slots);

  int64_t WidthOf(int column, const std::vector<SlotSpec>& slots) const;
  static int64_t WidthOf(int column, const std::vector<SlotSpec>& slots, int64_t dim);

  std::vector<ColumnIn> InputColumns(const Shape& shape, const nb::dict& columns,
                                     std::vector<std::unique_ptr<ArrayView>>* views) const;

  // Null for None.
  static std::unique_ptr<ArrayView> Optional(const char* what, nb::handle array, const nb::object& dtype,
                                             bool writable, const Shape& shape);

  nb::object key_dtype_;
  nb::object value_dtype_;
  nb::object bool_dtype_;
  nb::object uint32_dtype_;
  nb::object uint64_dtype_;
  AdmissionPolicy admission_;
  Sweep sweep_{{}};
  std::unique_ptr<Table> table_;
  std::shared_ptr<ParallelFor> pool_;
};

}  // namespace kvtable
