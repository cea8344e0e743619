// Element types, and the error that every operation of the table engine throws.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace kvtable {

// Every value of a key type is a legal key.
enum class KeyType : uint8_t { kInt64, kInt32, kUint64 };

enum class ValueType : uint8_t { kFloat32, kFloat16, kBFloat16, kFloat64 };

// Bytes of one element.
constexpr int64_t SizeOf(KeyType type) { return type == KeyType::kInt32 ? 4 : 8; }
constexpr int64_t SizeOf(ValueType type) {
  return type == ValueType::kFloat64 ? 8 : type == ValueType::kFloat32 ? 4 : 2;
}

// What went wrong, in the vocabulary TensorFlow uses.
enum class ErrorCode { kInvalidArgument, kResourceExhausted, kFailedPrecondition };

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace kvtable
