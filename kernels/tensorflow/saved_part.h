// The parts of a key-value table in a TensorFlow bundle, as docs/checkpoint-layout.md has it.
//
// A checkpoint comes from a disk, or from a stranger. So what its metadata says, and the shapes, dtypes and
// slices of its tensors, are held against each other before anything of it is used; what does not fit is
// DataLoss that names the file and the tensor.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "errors.h"
#include "saved_rows.h"
#include "table_resource.h"
#include "tensorflow/core/util/tensor_bundle/tensor_bundle.h"

namespace kvtools {

struct SavedPart {
  std::string prefix;  // of its tensors
  int64_t parts = 1;
  int64_t rows = 0;
  bool has_freqs = false;
  bool has_versions = false;
  // Scores and what they are, where the table was bounded; and the orders of equal ones.
  bool has_scores = false;
  bool has_orders = false;
  std::string eviction;
  std::optional<uint32_t> epoch;  // of the table, where it evicted by epochs
  // Whether versions are steps; otherwise they are seconds. What steps are counted from is not known of every table:
  // one that comes from another engine says no step.
  bool counts_steps = false;
  std::optional<uint32_t> step;
  // How many batches had drawn random numbers, where it says so.
  std::optional<uint64_t> draws;
  // Whether it has only what changed; then also the keys that went, in column "-removed".
  bool is_increment = false;
  int64_t removed = 0;
  std::map<std::string, StoredColumn> columns;  // by what goes behind the prefix: "-keys"
  std::vector<kvtable::SlotSpec> slots;
  std::optional<kvtable::Initializer> initializer;
  // Of keys that waited to be admitted, and the policy that they waited by.
  int64_t waiting_keys = 0;
  int64_t filter_bytes = 0;
  kvtable::AdmissionPolicy admission;
};

// "Checkpoint '<where>': tensor '<tensor>' <what>: the checkpoint is damaged."
template <class... What>
absl::Status Damaged(const std::string& where, const std::string& tensor, const What&... what) {
  return errors::DataLoss("Checkpoint '", where, "': tensor '", tensor, "' ", what...,
                          ": the checkpoint is damaged.");
}

// What TensorFlow said when it read the tensor, with both names.
absl::Status ReadError(const std::string& where, const std::string& tensor, const absl::Status& status);

// How many data files the bundle says it has.
absl::Status CountDataFiles(const std::string& where, tensorflow::BundleReader* reader, int32_t* files);

// All parts of table `base`: itself, or `base` + `infix` + its number. `increment`: whether they must have all rows, or
// only what changed.
absl::Status FindSavedParts(const TableConfig& config, const std::string& where, const std::string& base,
                            const std::string& infix, tensorflow::Env* env, tensorflow::BundleReader* reader,
                            bool increment, std::vector<SavedPart>* saved);

// The one whose slots go for all: a part that no step has reached yet has no rows and may have no slots.
const SavedPart& LargestPart(const std::vector<SavedPart>& saved);

}  // namespace kvtools
