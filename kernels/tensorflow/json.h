// A small JSON reader and string writer, for the metadata a checkpoint carries and the attributes of ops.
// Whatever the process's locale is, numbers have a decimal point.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace kvtools {

// A parsed JSON value. Numbers keep their text, so that 64-bit integers survive.
class Json {
 public:
  enum class Type { kNull, kBool, kNumber, kString, kArray, kObject };

  // Throws std::invalid_argument with the offset of the fault. Takes NaN, Infinity and -Infinity for numbers.
  static Json Parse(const std::string& text);

  Type type() const { return type_; }
  bool Has(const std::string& key) const { return object_.count(key) > 0; }

  // Accessors throw std::invalid_argument naming the key where the value is absent or of another type.
  const Json& At(const std::string& key) const;
  const std::string& String(const std::string& key) const;
  int64_t Int(const std::string& key) const;
  uint64_t Uint(const std::string& key) const;
  uint64_t Bits(const std::string& key) const;  // of an integer of 64 bits, with a sign or without
  double Double(const std::string& key, double fallback) const;
  bool Bool(const std::string& key, bool fallback) const;
  const std::vector<Json>& Array(const std::string& key) const;
  const std::vector<Json>& items() const;  // of an array

 private:
  friend class JsonParser;
  Type type_ = Type::kNull;
  std::string text_;  // the digits of a number, the contents of a string
  std::vector<Json> array_;
  std::map<std::string, Json> object_;
};

// `text` as a JSON string, quotes included.
std::string JsonQuote(const std::string& text);

// The shortest decimal of 6 digits or more that reads back as `value`; NaN as Python writes it.
std::string JsonNumber(double value);

}  // namespace kvtools
