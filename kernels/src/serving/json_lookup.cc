#include "serving/json_lookup.h"

#include <charconv>
#include <cmath>
#include <utility>

namespace kvtable {
namespace {

class Reader {
 public:
  explicit Reader(std::string_view text) : at_(text.data()), end_(text.data() + text.size()) {}

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

bool ReadKey(Reader& reader, KeyType key_type, int64_t* key) {
  switch (key_type) {
    case KeyType::kInt64:
      return reader.Int(key);
    case KeyType::kInt32: {
      int32_t narrow;
      if (!reader.Int(&narrow)) return false;
      *key = narrow;
      return true;
    }
    case KeyType::kUint64: {
      uint64_t bits;
      if (!reader.Int(&bits)) return false;
      *key = static_cast<int64_t>(bits);
      return true;
    }
  }
  return false;
}

// Reads into `all` what `read(&element)` reads, from a list or from lists in a list, whose ends are `splits`.
template <class Element, class Read>
bool ReadElements(Reader& reader, size_t most, std::vector<Element>* all, std::vector<int64_t>* splits,
                  const Read& read) {
  const auto one = [&] {
    Element element;
    if (all->size() == most || !read(&element)) return false;
    all->push_back(element);
    return true;
  };
  // Which of the two it is, the first element tells.
  Reader ahead = reader;
  const bool nested = ahead.Take('[') && ahead.Peek() == '[';
  if (!nested) return reader.List(one);
  splits->push_back(0);
  return reader.List([&] {
    if (splits->size() > most || !reader.List(one)) return false;
    splits->push_back(static_cast<int64_t>(all->size()));
    return true;
  });
}

}  // namespace

bool SplitsRise(const std::vector<int64_t>& splits, size_t keys) {
  if (splits.empty() || splits.front() != 0 || splits.back() != static_cast<int64_t>(keys)) return false;
  for (size_t i = 1; i < splits.size(); ++i) {
    if (splits[i] < splits[i - 1]) return false;
  }
  return true;
}

bool ReadJsonLookup(std::string_view body, KeyType key_type, int64_t max_keys, JsonLookup* lookup) {
  const size_t most = static_cast<size_t>(max_keys);
  Reader reader(body);
  bool has_keys = false, has_splits = false;
  std::vector<int64_t> nested, weights_nested, splits;
  if (!reader.Take('{')) return false;
  do {
    std::string_view name;
    if (!reader.Word(&name) || !reader.Take(':')) return false;
    if (name == "keys" && !has_keys) {
      has_keys = true;
      if (!ReadElements(reader, most, &lookup->keys, &nested,
                        [&](int64_t* key) { return ReadKey(reader, key_type, key); })) {
        return false;
      }
    } else if (name == "row_splits" && !has_splits) {
      has_splits = true;
      if (!reader.List([&] {
            int64_t split;
            if (splits.size() > most || !reader.Int(&split)) return false;
            splits.push_back(split);
            return true;
          })) {
        return false;
      }
    } else if (name == "weights" && !lookup->weighted) {
      lookup->weighted = true;
      if (!ReadElements(reader, most, &lookup->weights, &weights_nested,
                        [&](float* weight) { return reader.Number(weight); })) {
        return false;
      }
    } else if (name == "combiner" && lookup->combiner.empty()) {
      if (!reader.Word(&lookup->combiner)) return false;
      if (lookup->combiner != "sum" && lookup->combiner != "mean" && lookup->combiner != "sqrtn")
        return false;
    } else if (name == "missing" && lookup->missing.empty()) {
      if (!reader.Word(&lookup->missing)) return false;
      if (lookup->missing != "zeros" && lookup->missing != "default" && lookup->missing != "error")
        return false;
    } else {
      return false;
    }
  } while (reader.Take(','));
  if (!reader.Take('}') || !reader.AtEnd() || !has_keys) return false;

  lookup->pooled = !nested.empty() || has_splits;
  if (lookup->pooled == lookup->combiner.empty()) return false;
  if (!lookup->pooled) return !lookup->weighted;
  if (has_splits == !nested.empty()) return false;
  lookup->splits = has_splits ? std::move(splits) : std::move(nested);
  if (has_splits && !SplitsRise(lookup->splits, lookup->keys.size())) return false;
  if (!lookup->weighted) return true;
  if (lookup->weights.size() != lookup->keys.size()) return false;
  return has_splits ? weights_nested.empty() : weights_nested == lookup->splits;
}

}  // namespace kvtable
