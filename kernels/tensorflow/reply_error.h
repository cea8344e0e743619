// What a rank sends in place of rows where it could not look them up: the others wait for it.
//
// An error is known by its size, which is another than that of the rows that were asked for. In bytes: the length
// of what follows, int32; the status code, one byte; the message.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "errors.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace kvtools {

inline std::string CodeAndMessage(const absl::Status& status) {
  return std::string(1, static_cast<char>(status.code())) + std::string(status.message());
}

// Outputs 0 and 1, in place of rows: the error to each rank, of which `rank_elements` were expected, and its size.
inline absl::Status SendError(tensorflow::OpKernelContext* ctx, const std::vector<int64_t>& rank_elements,
                              tensorflow::DataType type, const std::string& code_and_message) {
  const int64_t element = tensorflow::DataTypeSize(type);
  const int32_t length = static_cast<int32_t>(code_and_message.size());
  const int64_t least = (int64_t{4} + length + element - 1) / element;
  std::vector<int64_t> sizes;
  int64_t total = 0;
  for (const int64_t expected : rank_elements) {
    sizes.push_back(least + (least == expected ? 1 : 0));
    total += sizes.back();
  }
  tensorflow::Tensor* flat = nullptr;
  tensorflow::Tensor* splits = nullptr;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, tensorflow::TensorShape({total}), &flat));
  TF_RETURN_IF_ERROR(
      ctx->allocate_output(1, tensorflow::TensorShape({static_cast<int64_t>(sizes.size())}), &splits));
  std::memset(flat->data(), 0, flat->TotalBytes());
  char* to = static_cast<char*>(flat->data());
  for (size_t r = 0; r < sizes.size(); ++r) {
    std::memcpy(to, &length, sizeof length);
    std::memcpy(to + 4, code_and_message.data(), code_and_message.size());
    splits->vec<int32_t>()(static_cast<int64_t>(r)) = static_cast<int32_t>(sizes[r]);
    to += sizes[r] * element;
  }
  return absl::OkStatus();
}

// What such a message says; InvalidArgument where it is none.
inline absl::Status ReadError(const char* bytes, int64_t size) {
  int32_t length = 0;
  if (size > 4) std::memcpy(&length, bytes, sizeof length);
  if (length < 1 || int64_t{4} + length > size) {
    return errors::InvalidArgument("it sent ", size, " bytes that are neither rows nor an error");
  }
  const auto code = static_cast<absl::StatusCode>(bytes[4]);
  return absl::Status(code == absl::StatusCode::kOk ? absl::StatusCode::kUnknown : code,
                      std::string(bytes + 5, static_cast<size_t>(length) - 1));
}

}  // namespace kvtools
