// In what type the rows of an exchange travel.
#pragma once

#include "errors.h"
#include "kernel.h"
#include "table_resource.h"

namespace kvtools {

// By the attributes of an op whose rows are of `dtype`: what the elements of its buffer are. A variant has those of
// Twire.
inline absl::Status ReadFlatType(tensorflow::OpKernelConstruction* ctx, tensorflow::DataType dtype,
                                 kvtable::ValueType* type) {
  tensorflow::DataType flat;
  TF_RETURN_IF_ERROR(ReadAttrs(ctx, "Tflat", &flat));
  if (flat == tensorflow::DT_VARIANT) TF_RETURN_IF_ERROR(ReadAttrs(ctx, "Twire", &flat));
  *type = ToValueType(flat);
  const bool narrower = dtype == tensorflow::DT_FLOAT && kvtable::SizeOf(*type) == 2;
  if (flat == dtype || narrower) return absl::OkStatus();
  return errors::InvalidArgument("rows of ", tensorflow::DataTypeString(dtype), " do not travel as ",
                                 tensorflow::DataTypeString(flat));
}

}  // namespace kvtools
