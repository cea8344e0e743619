// Element types, and the error that every operation of the table engine throws.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace kvtable {

// Every value of a key type is a legal key.
enum class KeyType : uint8_t { kInt64, kInt32, kUint64 };

// The integers and bool are for tables that are looked up and written: no optimizer trains them. A bool is a
// byte, 0 or 1.
enum class ValueType : uint8_t { kFloat32, kFloat16, kBFloat16, kFloat64, kInt8, kInt32, kInt64, kBool };

// Bytes of one element.
constexpr int64_t SizeOf(KeyType type) { return type == KeyType::kInt32 ? 4 : 8; }
constexpr int64_t SizeOf(ValueType type) {
  switch (type) {
    case ValueType::kFloat64:
    case ValueType::kInt64:
      return 8;
    case ValueType::kFloat32:
    case ValueType::kInt32:
      return 4;
    case ValueType::kInt8:
    case ValueType::kBool:
      return 1;
    default:
      return 2;
  }
}

constexpr bool IsFloating(ValueType type) {
  return type == ValueType::kFloat32 || type == ValueType::kFloat16 || type == ValueType::kBFloat16 ||
         type == ValueType::kFloat64;
}

// What a lookup gives for a key that has no row.
enum class Missing : uint8_t { kZeros, kInitial, kDefault };

// What a write does to each element of a row, given an operand of its own.
enum class RowOp : uint8_t { kMultiply, kDivide, kMin, kMax };

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
