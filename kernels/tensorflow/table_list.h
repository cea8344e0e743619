// The tables of an op that looks up several at once, each in one or more parts.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "catch_errors.h"
#include "table_resource.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace kvtools {

// The attributes `parts` and `dims`: how many handles each table has, and the width of its rows.
struct TableListAttrs {
  std::vector<int64_t> parts;
  std::vector<int64_t> dims;

  // Checks that they describe T tables with H handles in all.
  absl::Status Read(tensorflow::OpKernelConstruction* ctx);
  int tables() const { return static_cast<int>(parts.size()); }
};

// The tables behind input list `handles`.
class TableList {
 public:
  // FailedPrecondition where one is not initialized, InvalidArgument where one is not what the op expects: rows of
  // `dtype`, or, where that may be, such as come widened to it.
  absl::Status Find(tensorflow::OpKernelContext* ctx, const TableListAttrs& attrs,
                    tensorflow::DataType key_dtype, tensorflow::DataType dtype, bool may_be_widened = false);

  const kvtable::TableParts& parts(int table) const { return parts_[static_cast<size_t>(table)]; }
  // The same for arrays in host memory, of tables in a GPU's.
  kvtable::TableParts host_parts(int table) const;
  const TableConfig& config(int table) const { return configs_[static_cast<size_t>(table)]; }
  // Of the table's first part.
  TableResource* resource(int table) const { return firsts_[static_cast<size_t>(table)]; }
  // Runs `body`, whose exceptions are of these variables: a status that names the first, and how many others
  // there are.
  template <class Body>
  absl::Status Catch(const char* doing, const Body& body) const {
    try {
      return body();
    } catch (...) {
      return StatusOfException(std::string(doing) + " key-value variable " + Names());
    }
  }

 private:
  std::string Names() const;

  std::vector<tensorflow::core::RefCountPtr<TableResource>> resources_;
  std::vector<std::shared_ptr<kvtable::Table>> tables_;
  std::vector<kvtable::TableParts> parts_;
  mutable std::vector<std::shared_ptr<kvtable::Table>> held_;  // for host_parts
  std::vector<TableConfig> configs_;                           // of each table's first part
  std::vector<TableResource*> firsts_;
};

}  // namespace kvtools
