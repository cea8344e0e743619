#include "json.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <locale>
#include <sstream>
#include <stdexcept>

namespace kvtools {

class JsonParser {
 public:
  explicit JsonParser(const std::string& text) : text_(text) {}

  Json ParseDocument() {
    Json value = ParseValue(0);
    SkipSpace();
    if (pos_ != text_.size()) Fail("unexpected text after the value");
    return value;
  }

 private:
  static constexpr int kMaxDepth = 32;

  [[noreturn]] void Fail(const std::string& what) const {
    throw std::invalid_argument("bad JSON at offset " + std::to_string(pos_) + ": " + what);
  }

  void SkipSpace() {
    while (pos_ < text_.size() &&
           (text_[pos_] == ' ' || text_[pos_] == '\n' || text_[pos_] == '\t' || text_[pos_] == '\r')) {
      ++pos_;
    }
  }

  char Peek() {
    SkipSpace();
    if (pos_ >= text_.size()) Fail("unexpected end");
    return text_[pos_];
  }

  void Expect(char c) {
    if (Peek() != c) Fail(std::string("expected '") + c + "'");
    ++pos_;
  }

  void ExpectWord(const char* word) {
    for (const char* c = word; *c != '\0'; ++c, ++pos_) {
      if (pos_ >= text_.size() || text_[pos_] != *c) Fail(std::string("expected ") + word);
    }
  }

  Json ParseValue(int depth) {
    if (depth > kMaxDepth) Fail("nested too deeply");
    Json value;
    switch (Peek()) {
      case '{':
        ++pos_;
        value.type_ = Json::Type::kObject;
        if (Peek() == '}') {
          ++pos_;
          return value;
        }
        while (true) {
          if (Peek() != '"') Fail("expected a key");
          const std::string key = ParseString();
          Expect(':');
          value.object_[key] = ParseValue(depth + 1);
          if (Peek() == ',') {
            ++pos_;
            continue;
          }
          Expect('}');
          return value;
        }
      case '[':
        ++pos_;
        value.type_ = Json::Type::kArray;
        if (Peek() == ']') {
          ++pos_;
          return value;
        }
        while (true) {
          value.array_.push_back(ParseValue(depth + 1));
          if (Peek() == ',') {
            ++pos_;
            continue;
          }
          Expect(']');
          return value;
        }
      case '"':
        value.type_ = Json::Type::kString;
        value.text_ = ParseString();
        return value;
      case 't':
        ExpectWord("true");
        value.type_ = Json::Type::kBool;
        value.text_ = "true";
        return value;
      case 'f':
        ExpectWord("false");
        value.type_ = Json::Type::kBool;
        return value;
      case 'n':
        ExpectWord("null");
        return value;
      default:
        value.type_ = Json::Type::kNumber;
        value.text_ = ParseNumber();
        return value;
    }
  }

  void ExpectDigits() {
    const size_t begin = pos_;
    while (pos_ < text_.size() && text_[pos_] >= '0' && text_[pos_] <= '9') ++pos_;
    if (pos_ == begin) Fail("expected a value");
  }

  bool Skip(const char* one_of) {
    if (pos_ >= text_.size() || std::strchr(one_of, text_[pos_]) == nullptr) return false;
    ++pos_;
    return true;
  }

  std::string ParseNumber() {
    const size_t begin = pos_;
    // JSON has no such numbers; Python writes and reads them so.
    for (const char* word : {"NaN", "Infinity", "-Infinity"}) {
      const size_t length = std::strlen(word);
      if (text_.compare(pos_, length, word) != 0) continue;
      pos_ += length;
      return word;
    }
    Skip("-");
    ExpectDigits();
    if (Skip(".")) ExpectDigits();
    if (Skip("eE")) {
      Skip("+-");
      ExpectDigits();
    }
    return text_.substr(begin, pos_ - begin);
  }

  unsigned ParseHex4() {
    unsigned code = 0;
    for (int i = 0; i < 4; ++i, ++pos_) {
      if (pos_ >= text_.size()) Fail("unexpected end");
      const char c = text_[pos_];
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) Fail("bad \\u escape");
      code = code * 16 + static_cast<unsigned>(digit);
    }
    return code;
  }

  static void AppendUtf8(unsigned code, std::string* out) {
    if (code < 0x80) {
      out->push_back(static_cast<char>(code));
    } else if (code < 0x800) {
      out->push_back(static_cast<char>(0xC0 | (code >> 6)));
      out->push_back(static_cast<char>(0x80 | (code & 0x3F)));
    } else if (code < 0x10000) {
      out->push_back(static_cast<char>(0xE0 | (code >> 12)));
      out->push_back(static_cast<char>(0x80 | ((code >> 6) & 0x3F)));
      out->push_back(static_cast<char>(0x80 | (code & 0x3F)));
    } else {
      out->push_back(static_cast<char>(0xF0 | (code >> 18)));
      out->push_back(static_cast<char>(0x80 | ((code >> 12) & 0x3F)));
      out->push_back(static_cast<char>(0x80 | ((code >> 6) & 0x3F)));
      out->push_back(static_cast<char>(0x80 | (code & 0x3F)));
    }
  }

  std::string ParseString() {
    Expect('"');
    std::string out;
    while (true) {
      if (pos_ >= text_.size()) Fail("unterminated string");
      const char c = text_[pos_++];
      if (c == '"') return out;
      if (c != '\\') {
        out.push_back(c);
        continue;
      }
      if (pos_ >= text_.size()) Fail("unterminated string");
      const char escape = text_[pos_++];
      switch (escape) {
        case 'n':
          out.push_back('\n');
          break;
        case 't':
          out.push_back('\t');
          break;
        case 'r':
          out.push_back('\r');
          break;
        case 'b':
          out.push_back('\b');
          break;
        case 'f':
          out.push_back('\f');
          break;
        case 'u': {
          unsigned code = ParseHex4();
          if (code >= 0xD800 && code < 0xDC00 && text_.compare(pos_, 2, "\\u") == 0) {
            pos_ += 2;
            const unsigned low = ParseHex4();
            if (low < 0xDC00 || low > 0xDFFF) Fail("bad \\u escape");
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
          }
          AppendUtf8(code, &out);
          break;
        }
        case '"':
        case '\\':
        case '/':
          out.push_back(escape);
          break;
        default:
          Fail("bad escape");
      }
    }
  }

  const std::string& text_;
  size_t pos_ = 0;
};

Json Json::Parse(const std::string& text) { return JsonParser(text).ParseDocument(); }

const Json& Json::At(const std::string& key) const {
  const auto it = object_.find(key);
  if (it == object_.end()) throw std::invalid_argument("field '" + key + "' is missing");
  return it->second;
}

const std::string& Json::String(const std::string& key) const {
  const Json& value = At(key);
  if (value.type_ != Type::kString) throw std::invalid_argument("field '" + key + "' is not a string");
  return value.text_;
}

namespace {

template <class Integer>
bool ReadInteger(const std::string& text, Integer* number) {
  const char* const end = text.data() + text.size();
  const std::from_chars_result read = std::from_chars(text.data(), end, *number);
  return read.ec == std::errc() && read.ptr == end;
}

// By a stream, which can be told that the process's locale is none of its business; std::from_chars for
// doubles is not in every compiler that this is built with.
double ReadDouble(const std::string& text) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (text == "NaN") return std::numeric_limits<double>::quiet_NaN();
  if (text == "Infinity") return kInfinity;
  if (text == "-Infinity") return -kInfinity;
  std::istringstream in(text);
  in.imbue(std::locale::classic());
  double number = 0.0;
  in >> number;
  // A number that is too large is the largest there is, and a failure.
  if (in.fail() && number >= std::numeric_limits<double>::max()) return kInfinity;
  if (in.fail() && number <= std::numeric_limits<double>::lowest()) return -kInfinity;
  return number;
}

}  // namespace

int64_t Json::Int(const std::string& key) const {
  const Json& value = At(key);
  int64_t number = 0;
  if (value.type_ != Type::kNumber || !ReadInteger(value.text_, &number)) {
    throw std::invalid_argument("field '" + key + "' is not an integer of 64 bits");
  }
  return number;
}

uint64_t Json::Uint(const std::string& key) const {
  const Json& value = At(key);
  uint64_t number = 0;
  if (value.type_ != Type::kNumber || !ReadInteger(value.text_, &number)) {
    throw std::invalid_argument("field '" + key + "' is not an unsigned integer of 64 bits");
  }
  return number;
}

bool Json::Bool(const std::string& key, bool fallback) const {
  if (!Has(key)) return fallback;
  const Json& value = At(key);
  if (value.type_ != Type::kBool) throw std::invalid_argument("'" + key + "' is not true or false");
  return value.text_ == "true";
}

uint64_t Json::Bits(const std::string& key) const {
  const Json& value = At(key);
  const bool is_negative = value.type_ == Type::kNumber && !value.text_.empty() && value.text_[0] == '-';
  return is_negative ? static_cast<uint64_t>(Int(key)) : Uint(key);
}

double Json::Double(const std::string& key, double fallback) const {
  if (!Has(key)) return fallback;
  const Json& value = At(key);
  if (value.type_ != Type::kNumber) throw std::invalid_argument("field '" + key + "' is not a number");
  return ReadDouble(value.text_);
}

const std::vector<Json>& Json::Array(const std::string& key) const {
  const Json& value = At(key);
  if (value.type_ != Type::kArray) throw std::invalid_argument("field '" + key + "' is not an array");
  return value.array_;
}

const std::vector<Json>& Json::items() const {
  if (type_ != Type::kArray) throw std::invalid_argument("an array is expected");
  return array_;
}

std::string JsonQuote(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out.push_back('\\');
      out.push_back(c);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char buffer[8];
      std::snprintf(buffer, sizeof(buffer), "\\u%04x", c);
      out += buffer;
    } else {
      out.push_back(c);
    }
  }
  out.push_back('"');
  return out;
}

std::string JsonNumber(double value) {
  if (std::isnan(value)) return "NaN";
  if (value == 0.0)
    return std::signbit(value) ? "-0.0" : "0.0";  // "-0" is an integer to some, without a sign
  // JSON has no infinities; 1e999 reads back as infinity everywhere.
  if (std::isinf(value)) return value > 0 ? "1e999" : "-1e999";
  std::string text;
  for (int digits = 6; digits <= std::numeric_limits<double>::max_digits10; ++digits) {
    std::ostringstream out;
    out.imbue(std::locale::classic());
    out.precision(digits);
    out << value;
    text = out.str();
    if (ReadDouble(text) == value) break;
  }
  return text;
}

}  // namespace kvtools
