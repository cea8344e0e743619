// The columns of a table as tensors of a TensorFlow bundle, whole or a run of rows at a time.
#pragma once

#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/tensor_slice.h"

namespace kvtools {

// The layout that is written, and the newest that is read: docs/checkpoint-layout.md.
inline constexpr int64_t kCheckpointLayout = 1;

// Keys, stamps, scores and orders are vectors, which `width` 0 says.
inline tensorflow::TensorShape ColumnShape(int64_t n, int64_t width) {
  return width == 0 ? tensorflow::TensorShape({n}) : tensorflow::TensorShape({n, width});
}

// Rows [start, start + length) of a column.
inline tensorflow::TensorSlice RowSlice(int64_t width, int64_t start, int64_t length) {
  tensorflow::TensorSlice slice(width == 0 ? 1 : 2);
  slice.set_start(0, start);
  slice.set_length(0, length);
  return slice;
}

}  // namespace kvtools
