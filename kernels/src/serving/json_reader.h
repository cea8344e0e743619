// JSON as clients write it, read from its bytes without making anything of it first. What is refused may be wrong, or only
// unusual: who asks has another reader for that.
#pragma once

#include <charconv>
#include <cmath>
#include <string_view>
#include <system_error>

namespace kvtable {

class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : at_(text.data()), end_(text.data() + text.size()) {}

  // The next character that is no white space, 0 at the end. A 0 in the text itself stops a reader, too: it
  // is in no JSON outside of strings, where it is not legal either.
  char Peek() {
    while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\r' || *at_ == '\t')) ++at_;
    return at_ == end_ ? '\0' : *at_;
  }

  bool Take(char wanted) {
    if (Peek() != wanted || at_ == end_) return false;
    ++at_;
    return true;
  }

  bool AtEnd() {
    Peek();
    return at_ == end_;
  }

  // A string of letters and '_', which no escape can be in.
  bool Word(std::string_view* word) {
    if (!Take('"')) return false;
    const char* const begin = at_;
    while (at_ != end_ && ((*at_ >= 'a' && *at_ <= 'z') || *at_ == '_')) ++at_;
    *word = std::string_view(begin, static_cast<size_t>(at_ - begin));
    return at_ != end_ && *at_++ == '"';
  }

  // A string without escapes, whatever else is in it: which text that is, whoever compares it knows.
  bool Text(std::string_view* text) {
    if (!Take('"')) return false;
    const char* const begin = at_;
    while (at_ != end_ && *at_ != '"' && *at_ != '\\' && static_cast<unsigned char>(*at_) >= 0x20) ++at_;
    *text = std::string_view(begin, static_cast<size_t>(at_ - begin));
    return at_ != end_ && *at_++ == '"';
  }

  // "true" or "false".
  bool Flag(bool* flag) {
    Peek();
    const std::string_view rest(at_, static_cast<size_t>(end_ - at_));
    *flag = rest.substr(0, 4) == "true";
    if (!*flag && rest.substr(0, 5) != "false") return false;
    at_ += *flag ? 4 : 5;
    return true;
  }

  // "{", names and values with commas between them, "}": `member(name)` reads a value.
  template <class Member>
  bool Object(const Member& member) {
    if (!Take('{')) return false;
    if (Take('}')) return true;
    do {
      std::string_view name;
      if (!Text(&name) || !Take(':') || !member(name)) return false;
    } while (Take(','));
    return Take('}');
  }

  // An integer: what JSON has as one, and nothing that goes on as a fraction or an exponent.
  template <class Integer>
  bool Int(Integer* integer) {
    Peek();
    const char* const begin = at_;
    const char* digits = at_ + (at_ != end_ && *at_ == '-');
    if (digits == end_ || *digits < '0' || *digits > '9') return false;
    if (*digits == '0' && digits + 1 != end_ && digits[1] >= '0' && digits[1] <= '9') return false;
    if (*digits == '0') {  // from_chars knows no -0 of an unsigned type
      *integer = 0;
      at_ = digits + 1;
    } else {
      const auto [stop, error] = std::from_chars(begin, end_, *integer);
      if (error != std::errc()) return false;
      at_ = stop;
    }
    return at_ == end_ || (*at_ != '.' && *at_ != 'e' && *at_ != 'E');
  }

  // Any number whose nearest float is finite.
  bool Number(float* number) {
    Peek();
    const char* const begin = at_;
    if (at_ != end_ && *at_ == '-') ++at_;
    const bool zero = at_ != end_ && *at_ == '0';
    const char* const whole = at_;
    if (!Digits() || (zero && at_ != whole + 1)) return false;
    if (at_ != end_ && *at_ == '.') {
      ++at_;
      if (!Digits()) return false;
    }
    if (at_ != end_ && (*at_ == 'e' || *at_ == 'E')) {
      ++at_;
      if (at_ != end_ && (*at_ == '+' || *at_ == '-')) ++at_;
      if (!Digits()) return false;
    }
    double wide;
    const auto [stop, error] = std::from_chars(begin, at_, wide);
    if (error != std::errc() || stop != at_) return false;
    *number = static_cast<float>(wide);  // as NumPy makes a float32 of Python's number
    return std::isfinite(*number);
  }

  // "[", elements with commas between them, "]".
  template <class Element>
  bool List(const Element& element) {
    if (!Take('[')) return false;
    if (Take(']')) return true;
    do {
      if (!element()) return false;
    } while (Take(','));
    return Take(']');
  }

 private:
  bool Digits() {
    const char* const begin = at_;
    while (at_ != end_ && *at_ >= '0' && *at_ <= '9') ++at_;
    return at_ != begin;
  }

  const char* at_;
  const char* const end_;
};

}  // namespace kvtable
