#include "table_list.h"

#include "errors.h"

namespace kvtools {

namespace tf = tensorflow;

absl::Status TableListAttrs::Read(tf::OpKernelConstruction* ctx) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("parts", &parts));
  TF_RETURN_IF_ERROR(ctx->GetAttr("dims", &dims));
  int handles, wanted;
  TF_RETURN_IF_ERROR(ctx->GetAttr("H", &handles));
  TF_RETURN_IF_ERROR(ctx->GetAttr("T", &wanted));
  int64_t total = 0;
  bool valid = parts.size() == dims.size() && static_cast<int>(parts.size()) == wanted;
  for (int64_t count : parts) {
    valid &= count >= 1 && count <= handles;
    if (valid) total += count;
  }
  for (int64_t dim : dims) valid &= dim >= 1;
  if (valid && total == handles) return absl::OkStatus();
  return errors::InvalidArgument("parts are of ", parts.size(), " tables and ", total, " handles, dims of ",
                                 dims.size(), " tables; expected ", wanted, " tables and ", handles,
                                 " handles");
}

absl::Status TableList::Find(tf::OpKernelContext* ctx, const TableListAttrs& attrs, tf::DataType key_dtype,
                             tf::DataType dtype, bool may_be_widened) {
  int h = 0;  // `handles` come first in every op
  for (int t = 0; t < attrs.tables(); ++t) {
    const int64_t dim = attrs.dims[static_cast<size_t>(t)];
    parts_.emplace_back();
    for (int64_t p = 0; p < attrs.parts[static_cast<size_t>(t)]; ++p, ++h) {
      resources_.emplace_back();
      tables_.emplace_back();
      TF_RETURN_IF_ERROR(LookupTable(ctx, h, &resources_.back(), &tables_.back()));
      const TableConfig& config = resources_.back()->config();
      const bool fits = config.value_dtype == dtype || (may_be_widened && IsWidened(config, dtype));
      if (config.key_dtype != key_dtype || !fits || config.dim != dim) {
        return errors::InvalidArgument(
            "Key-value variable '", config.name, "' is ", tf::DataTypeString(config.key_dtype), " -> ",
            tf::DataTypeString(config.value_dtype), "[", config.dim, "], wanted ",
            tf::DataTypeString(key_dtype), " -> ", tf::DataTypeString(dtype), "[", dim, "]");
      }
      parts_.back().push_back(tables_.back().get());
      if (p == 0) configs_.push_back(config);
      if (p == 0) firsts_.push_back(resources_.back().get());
    }
  }
  return absl::OkStatus();
}

kvtable::TableParts TableList::host_parts(int table) const {
  size_t h = 0;
  for (int t = 0; t < table; ++t) h += parts(t).size();
  kvtable::TableParts found;
  for (size_t p = 0; p < parts(table).size(); ++p) {
    held_.push_back(resources_[h + p]->table());
    found.push_back(held_.back().get());
  }
  return found;
}

std::string TableList::Names() const {
  const std::string first = "'" + configs_[0].name + "'";
  return configs_.size() == 1 ? first : first + " and " + std::to_string(configs_.size() - 1) + " others";
}

}  // namespace kvtools
