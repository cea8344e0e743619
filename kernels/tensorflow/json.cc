#include "json.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
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
      default: {
        const size_t begin = pos_;
        while (pos_ < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[pos_])) != 0 ||
                                       text_[pos_] == '-' || text_[pos_] == '+' || text_[pos_] == '.')) {
          ++pos_;
        }
        value.type_ = Json::Type::kNumber;
        value.text_ = text_.substr(begin, pos_ - begin);
        char* end = nullptr;
        std::strtod(value.text_.c_str(), &end);
        if (value.text_.empty() || *end != '\0') Fail("expected a value");
        return value;
      }
    }
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
            code = 0x10000 + ((code - 0xD800) << 10) + (ParseHex4() - 0xDC00);
          }
          AppendUtf8(code, &out);
          break;
        }
        default:
          out.push_back(escape);
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

int64_t Json::Int(const std::string& key) const {
  const Json& value = At(key);
  char* end = nullptr;
  const int64_t number = std::strtoll(value.text_.c_str(), &end, 10);
  if (value.type_ != Type::kNumber || *end != '\0') {
    throw std::invalid_argument("field '" + key + "' is not an integer");
  }
  return number;
}

uint64_t Json::Uint(const std::string& key) const {
  const Json& value = At(key);
  char* end = nullptr;
  const uint64_t number = std::strtoull(value.text_.c_str(), &end, 10);
  if (value.type_ != Type::kNumber || *end != '\0' || value.text_[0] == '-') {
    throw std::invalid_argument("field '" + key + "' is not an unsigned integer");
  }
  return number;
}

double Json::Double(const std::string& key, double fallback) const {
  if (!Has(key)) return fallback;
  const Json& value = At(key);
  if (value.type_ != Type::kNumber) throw std::invalid_argument("field '" + key + "' is not a number");
  return std::strtod(value.text_.c_str(), nullptr);
}

const std::vector<Json>& Json::Array(const std::string& key) const {
  const Json& value = At(key);
  if (value.type_ != Type::kArray) throw std::invalid_argument("field '" + key + "' is not an array");
  return value.array_;
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
  // JSON has no infinities and no NaN; 1e999 reads back as infinity everywhere.
  if (std::isinf(value)) return value > 0 ? "1e999" : "-1e999";
  char buffer[32];
  for (int digits = 6; digits <= 17; ++digits) {
    std::snprintf(buffer, sizeof(buffer), "%.*g", digits, value);
    if (std::strtod(buffer, nullptr) == value) break;
  }
  return buffer;
}

}  // namespace kvtools
