// What the ops that save tables are told of each of them, by attributes.
#pragma once

#include <string>
#include <vector>

#include "errors.h"
#include "kernel.h"
#include "table_writer.h"

namespace kvtools {

class SavedNames {
 public:
  // Of an op with this many tables.
  absl::Status Read(tensorflow::OpKernelConstruction* ctx, const char* op, int tables) {
    TF_RETURN_IF_ERROR(
        ReadAttrs(ctx, "tensor_prefixes", &prefixes_, "names", &names_, "part", &part_, "parts", &parts_));
    const size_t n = static_cast<size_t>(tables);
    if (prefixes_.size() == n && names_.size() == n && part_.size() == n && parts_.size() == n) {
      return absl::OkStatus();
    }
    return errors::InvalidArgument(op, " wants one prefix, name, part and parts per table");
  }

  size_t size() const { return prefixes_.size(); }

  // Names table i.
  void Name(size_t i, SavedTable* saved) const {
    saved->prefix = prefixes_[i];
    saved->name = names_[i];
    saved->part = part_[i];
    saved->parts = parts_[i];
  }

 private:
  std::vector<std::string> prefixes_;
  std::vector<std::string> names_;
  std::vector<int64_t> part_;
  std::vector<int64_t> parts_;
};

}  // namespace kvtools
