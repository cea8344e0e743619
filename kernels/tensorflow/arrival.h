// What came of the other ranks, where it lies: as a tensor, or in the memory of those who sent it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "errors.h"
#include "kvtable/shared_exchange.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_tensor_data.h"

namespace kvtools {

// In a variant tensor: those who sent it know that it has been read as the last such tensor goes.
struct Arrival {
  std::string TypeName() const { return "kvtools::Arrival"; }
  void Encode(tensorflow::VariantTensorData*) const {}  // it is of no use in another process
  bool Decode(const tensorflow::VariantTensorData&) { return false; }

  std::shared_ptr<const kvtable::SharedExchange::Arrival> pieces;
  tensorflow::DataType dtype = tensorflow::DT_INVALID;
};

// The pieces of a tensor, which are one, or of a variant that has an Arrival, which are one for each rank.
struct Received {
  absl::Status Read(const tensorflow::Tensor& tensor) {
    if (tensor.dtype() != tensorflow::DT_VARIANT) {
      dtype = tensor.dtype();
      pieces = {{static_cast<const char*>(tensor.data()), static_cast<int64_t>(tensor.TotalBytes())}};
      return absl::OkStatus();
    }
    const Arrival* const arrival =
        tensor.NumElements() == 1 ? tensor.flat<tensorflow::Variant>()(0).get<Arrival>() : nullptr;
    if (arrival == nullptr || arrival->pieces == nullptr) {
      return errors::InvalidArgument("expected what KvSharedExchange gives, got ", tensor.DebugString());
    }
    in_place = true;
    dtype = arrival->dtype;
    pieces = arrival->pieces->pieces;
    return absl::OkStatus();
  }

  int64_t elements() const {
    int64_t bytes = 0;
    for (const auto& piece : pieces) bytes += piece.bytes;
    return bytes / tensorflow::DataTypeSize(dtype);
  }

  bool in_place = false;  // a piece of each rank
  tensorflow::DataType dtype = tensorflow::DT_INVALID;
  std::vector<kvtable::SharedExchange::Piece> pieces;
};

}  // namespace kvtools
