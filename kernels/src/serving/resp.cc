#include "serving/resp.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace kvtable {
namespace {

constexpr size_t kLongestInline = 1 << 16;
constexpr size_t kLongestNumber = 32;    // "*1234567\r\n" and its like, with room to tell what is wrong
constexpr int64_t kMostWords = 1 << 20;  // as in Redis; the limit of keys is told in a better message
constexpr size_t kShownBytes = 64;

bool SameWord(std::string_view word, std::string_view upper) {
  if (word.size() != upper.size()) return false;
  for (size_t i = 0; i < word.size(); ++i) {
    const char c = word[i] >= 'a' && word[i] <= 'z' ? static_cast<char>(word[i] - 'a' + 'A') : word[i];
    if (c != upper[i]) return false;
  }
  return true;
}

// Text from outside, as an error may show it: in one line, and not long.
std::string Shown(std::string_view text) {
  std::string shown;
  for (const char c : text.substr(0, kShownBytes)) shown += c >= ' ' && c < 0x7f ? c : '?';
  if (text.size() > kShownBytes) shown += "...";
  return shown;
}

bool ReadNumber(std::string_view text, int64_t* number) {
  bool negative;
  return ReadDecimal(text, number, &negative) && (negative == (*number < 0));
}

int64_t Digits(int64_t number) {
  int64_t digits = 1;
  while (number >= 10) number /= 10, ++digits;
  return digits;
}

char* PutHead(char* out, char kind, int64_t number) {
  *out++ = kind;
  const std::string digits = std::to_string(number);
  std::memcpy(out, digits.data(), digits.size());
  out += digits.size();
  *out++ = '\r';
  *out++ = '\n';
  return out;
}

}  // namespace

bool ReadDecimal(std::string_view text, int64_t* bits, bool* negative) {
  *negative = !text.empty() && text[0] == '-';
  if (*negative) text.remove_prefix(1);
  if (text.empty() || text.size() > 20) return false;
  uint64_t number = 0;
  const bool fits = text.size() < 20;  // whatever the digits are
  for (const char c : text) {
    const unsigned digit = static_cast<unsigned>(c) - '0';
    if (digit > 9) return false;
    if (!fits && number > (std::numeric_limits<uint64_t>::max() - digit) / 10) return false;
    number = number * 10 + digit;
  }
  if (*negative) {
    if (number > uint64_t{1} << 63) return false;
    number = 0 - number;
    *negative = number != 0;
  }
  *bits = static_cast<int64_t>(number);
  return true;
}

void RespReader::Feed(std::string_view bytes) {
  if (at_ >
      0) {  // What was read goes, as soon as it is half of what is there: each byte is moved once or twice.
    if (at_ == buffer_.size()) {
      Drop();
    } else if (at_ >= buffer_.size() - at_) {
      buffer_.erase(0, at_);
      next_ -= at_;
      for (auto& [place, length] : spans_) place -= at_;
      at_ = 0;
    }
  }
  buffer_.append(bytes);
  words_.clear();
}

RespReader::Kind RespReader::Next() {
  table_.clear();
  keys_.clear();
  commands_.clear();
  words_.clear();
  while (true) {
    if (!whole_) {
      const Step step = ReadCommand();
      if (step == Step::kEmpty) continue;
      if (step == Step::kBroken) {
        if (!commands_.empty()) return Kind::kLookup;  // It breaks again, in its turn.
        return Kind::kBroken;
      }
      if (step == Step::kMore) return commands_.empty() ? Kind::kNothing : Kind::kLookup;
      whole_ = true;
    }
    std::string fault;
    if (Append(commands_.empty(), &fault)) {
      whole_ = false;
      at_ = next_;
      left_ = -1;
      if (static_cast<int64_t>(keys_.size()) >= limits_.lookup_keys) return Kind::kLookup;
      continue;
    }
    if (!commands_.empty()) return Kind::kLookup;  // This one comes with the next call.
    whole_ = false;
    at_ = next_;
    left_ = -1;
    if (!fault.empty()) {
      fault_ = std::move(fault);
      return Kind::kRefused;
    }
    for (const auto& [place, length] : spans_) words_.emplace_back(buffer_.data() + place, length);
    return Kind::kCommand;
  }
}

RespReader::Step RespReader::ReadCommand() {
  if (left_ < 0) {
    spans_.clear();
    next_ = at_;
    if (at_ == buffer_.size()) return Step::kMore;
    if (buffer_[at_] != '*') return ReadInline();
    const Step step = ReadCount();
    if (step != Step::kWhole) return step;
  }
  return ReadWords();
}

RespReader::Step RespReader::ReadInline() {
  const size_t end = buffer_.find('\n', at_);
  if (end == std::string::npos || end - at_ > kLongestInline) {
    if (buffer_.size() - at_ > kLongestInline) return Break("Protocol error: too big inline request");
    return Step::kMore;
  }
  size_t from = at_;
  const auto blank = [this](size_t i) {
    return buffer_[i] == ' ' || buffer_[i] == '\t' || buffer_[i] == '\r';
  };
  while (from < end) {
    while (from < end && blank(from)) ++from;
    size_t to = from;
    while (to < end && !blank(to)) ++to;
    if (to > from) spans_.emplace_back(from, to - from);
    from = to;
  }
  next_ = end + 1;
  if (!spans_.empty()) return Step::kWhole;
  at_ = next_;
  return Step::kEmpty;
}

RespReader::Step RespReader::ReadCount() {
  size_t end;
  if (!ReadLine(at_ + 1, kLongestNumber, &end)) {
    return buffer_.size() - at_ > kLongestNumber ? Break("Protocol error: too big mbulk count string")
                                                 : Step::kMore;
  }
  int64_t count;
  if (!ReadNumber({buffer_.data() + at_ + 1, end - at_ - 1}, &count) || count > kMostWords) {
    return Break("Protocol error: invalid multibulk length");
  }
  next_ = end + 2;
  if (count <= 0) {
    at_ = next_;
    return Step::kEmpty;
  }
  left_ = count;
  return Step::kWhole;
}

RespReader::Step RespReader::ReadWords() {
  while (left_ > 0) {
    if (next_ == buffer_.size()) break;
    if (buffer_[next_] != '$') {
      return Break("Protocol error: expected '$', got '" + Shown({buffer_.data() + next_, 1}) + "'");
    }
    size_t end;
    int64_t length;
    if (!ReadShortLength(next_ + 1, &end, &length)) {
      if (!ReadLine(next_ + 1, kLongestNumber, &end)) {
        if (buffer_.size() - next_ > kLongestNumber)
          return Break("Protocol error: too big bulk count string");
        break;
      }
      if (!ReadNumber({buffer_.data() + next_ + 1, end - next_ - 1}, &length) || length < 0)
        return Break("Protocol error: invalid bulk length");
    }
    if (length > limits_.word_bytes) return Break("Protocol error: invalid bulk length");
    const size_t start = end + 2, size = static_cast<size_t>(length);
    if (buffer_.size() < start + size + 2) break;
    if (buffer_[start + size] != '\r' || buffer_[start + size + 1] != '\n') {
      return Break("Protocol error: a bulk string is longer than it says");
    }
    spans_.emplace_back(start, size);
    next_ = start + size + 2;
    --left_;
  }
  if (static_cast<int64_t>(buffer_.size() - at_) > limits_.bytes &&
      static_cast<int64_t>(next_ - at_) > limits_.bytes) {
    return Break("Protocol error: a command of over " + std::to_string(limits_.bytes) +
                 " bytes; ask for fewer keys at once");
  }
  return left_ > 0 ? Step::kMore : Step::kWhole;
}

RespReader::Step RespReader::Break(std::string fault) {
  fault_ = std::move(fault);
  return Step::kBroken;
}

bool RespReader::ReadShortLength(size_t from, size_t* end, int64_t* length) const {
  const char* const text = buffer_.data() + from;
  const size_t most = std::min<size_t>(buffer_.size() - from, 4);
  size_t digits = 0;
  int64_t number = 0;
  while (digits < most && text[digits] >= '0' && text[digits] <= '9')
    number = number * 10 + (text[digits++] - '0');
  if (digits == 0 || buffer_.size() - from < digits + 2 || text[digits] != '\r' || text[digits + 1] != '\n')
    return false;
  *end = from + digits;
  *length = number;
  return true;
}

bool RespReader::ReadLine(size_t from, size_t longest, size_t* end) const {
  const size_t stop = std::min(buffer_.size(), from + longest);
  for (size_t i = from; i + 1 < stop; ++i) {
    if (buffer_[i] == '\r' && buffer_[i + 1] == '\n') {
      *end = i;
      return true;
    }
  }
  return false;
}

bool RespReader::Append(bool first, std::string* fault) {
  const auto word = [this](size_t i) {
    return std::string_view(buffer_.data() + spans_[i].first, spans_[i].second);
  };
  const std::string_view name = word(0);
  const bool get = SameWord(name, "GET"), hget = SameWord(name, "HGET"), hmget = SameWord(name, "HMGET");
  if (!get && !hget && !hmget && !SameWord(name, "MGET")) return false;
  const bool single = get || hget, hash = hget || hmget;
  const size_t begin = hash ? 2 : 1;
  if (spans_.size() < begin + 1 || (single && spans_.size() != begin + 1)) {
    const std::string_view known = hget ? "hget" : hmget ? "hmget" : get ? "get" : "mget";
    *fault = "wrong number of arguments for '" + std::string(known) + "' command";
    return false;
  }
  const int64_t count = static_cast<int64_t>(spans_.size() - begin);
  if (count > limits_.keys) {
    *fault = "got " + std::to_string(count) + " keys, expected at most " + std::to_string(limits_.keys) +
             "; send several commands";
    return false;
  }
  const auto table_of = [&](size_t i, std::string_view* key) {
    *key = word(i);
    if (hash) return word(1);
    const size_t colon = key->rfind(':');
    if (colon == std::string_view::npos) return std::string_view();
    const std::string_view table = key->substr(0, colon);
    key->remove_prefix(colon + 1);
    return table;
  };
  std::string_view key;
  const std::string_view table = table_of(begin, &key);
  if (!first && (table != table_ || static_cast<int64_t>(keys_.size()) + count > limits_.lookup_keys))
    return false;
  Command command{count, single, 0, 0};
  const size_t before = keys_.size();
  keys_.resize(before + static_cast<size_t>(count));
  for (size_t i = begin; i < spans_.size(); ++i) {
    if (table_of(i, &key) != table) {  // Rows of several tables: these are looked up elsewhere.
      keys_.resize(before);
      return false;
    }
    int64_t bits;
    bool negative;
    if (!ReadDecimal(key, &bits, &negative)) {
      keys_.resize(before);
      *fault = "got key '" + Shown(key) + "', expected an integer, as in table:17";
      return false;
    }
    if (negative) {
      command.low = std::min(command.low, bits);
    } else {
      command.high = std::max(command.high, static_cast<uint64_t>(bits));
    }
    keys_[before + i - begin] = bits;
  }
  if (first) table_ = table;
  commands_.push_back(command);
  return true;
}

void RespReader::Drop() {
  buffer_.clear();
  if (buffer_.capacity() > kLongestInline * 16) buffer_.shrink_to_fit();
  at_ = next_ = 0;
  spans_.clear();
}

int64_t RowsBytes(const std::vector<RespReader::Command>& commands, const uint8_t* found, int64_t row_bytes,
                  bool resp3) {
  const int64_t row = 1 + Digits(row_bytes) + 2 + row_bytes + 2, null = resp3 ? 3 : 5;
  int64_t bytes = 0;
  for (const RespReader::Command& command : commands) {
    if (!command.single) bytes += 1 + Digits(command.keys) + 2;
    int64_t there = 0;
    for (int64_t i = 0; i < command.keys; ++i) there += found[i] != 0;
    bytes += there * row + (command.keys - there) * null;
    found += command.keys;
  }
  return bytes;
}

void WriteRows(const std::vector<RespReader::Command>& commands, const uint8_t* rows, const uint8_t* found,
               int64_t row_bytes, bool resp3, char* out) {
  char head[32];
  const size_t head_bytes = static_cast<size_t>(PutHead(head, '$', row_bytes) - head);
  const size_t size = static_cast<size_t>(row_bytes);
  for (const RespReader::Command& command : commands) {
    if (!command.single) out = PutHead(out, '*', command.keys);
    for (int64_t i = 0; i < command.keys; ++i, rows += row_bytes, ++found) {
      if (!*found) {
        std::memcpy(out, resp3 ? "_\r\n" : "$-1\r\n", resp3 ? 3 : 5);
        out += resp3 ? 3 : 5;
        continue;
      }
      std::memcpy(out, head, head_bytes);
      out += head_bytes;
      std::memcpy(out, rows, size);
      out += size;
      *out++ = '\r';
      *out++ = '\n';
    }
  }
}

}  // namespace kvtable
