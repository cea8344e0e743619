#include "serving/prepared_lookup.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <functional>
#include <limits>

#include "kvtable/types.h"
#include "serving/resp.h"

namespace kvtable {
namespace {

constexpr size_t kMostAtOnce = 65536;
constexpr size_t kMostDigits = 20;

using Clock = std::chrono::steady_clock;

void AppendNumber(int64_t number, std::string* text) {
  char digits[24];
  const char* const end = std::to_chars(digits, digits + sizeof(digits), number).ptr;
  text->append(digits, static_cast<size_t>(end - digits));
}

// Whether a table of this type can have the key, which was read as `bits`.
bool InRange(KeyType type, int64_t bits, bool negative) {
  if (type == KeyType::kUint64) return !negative;
  if (!negative && bits < 0) return false;  // 2^63 and more
  return type != KeyType::kInt32 ||
         (bits >= std::numeric_limits<int32_t>::min() && bits <= std::numeric_limits<int32_t>::max());
}

}  // namespace

bool PreparedLookup::Match(std::string_view data, size_t* bytes, int64_t* key) const {
  const std::string_view head = plan_.head;
  if (plan_.key_begin == plan_.key_end) {
    *bytes = head.size();
    return data.size() >= head.size() && data.compare(0, head.size(), head) == 0;
  }
  if (data.compare(0, plan_.key_begin, head, 0, plan_.key_begin) != 0) return false;
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  size_t end = plan_.key_begin;
  if (end < data.size() && data[end] == '-') ++end;
  const size_t first = end;
  while (end < data.size() && digit(data[end])) ++end;
  if (end == first || end - first > kMostDigits) return false;
  const std::string_view rest = head.substr(plan_.key_end);
  if (data.compare(end, rest.size(), rest) != 0) return false;
  bool negative;
  if (!ReadDecimal(data.substr(plan_.key_begin, end - plan_.key_begin), key, &negative)) return false;
  *bytes = end + rest.size();
  return InRange(plan_.table->key_type(), *key, negative);
}

size_t PreparedLookup::Answer(std::string_view data, size_t at, std::string_view defaults, std::string* out,
                              int64_t* answers) {
  const bool one_row = plan_.form.one_row, binary = plan_.form.binary_rows;
  const int64_t dim = plan_.table->dim();
  const auto allocate = [this](int64_t bytes) -> void* {
    rows_.resize(static_cast<size_t>(bytes));
    return rows_.data();
  };
  const auto in_place = [](int64_t, const std::function<void()>& work) { work(); };
  *answers = 0;
  while (at < data.size() && out->size() < kMostAtOnce) {
    const Clock::time_point began = Clock::now();
    size_t head_bytes;
    int64_t key;
    if (!Match(data.substr(at), &head_bytes, &key)) break;
    if (data.size() - at - head_bytes < plan_.body_bytes) break;
    std::string_view body = data.substr(at + head_bytes, plan_.body_bytes);
    if (one_row) {
      body = {reinterpret_cast<const char*>(&key), sizeof(key)};
    } else if (!plan_.form.binary_keys) {
      // Not more than once, where it is too much: it would be read again.
      const int64_t most = 1 + std::count(body.begin(), body.end(), ',');
      if (most * dim > plan_.form.max_numbers) break;
    }
    TableAnswer answer;
    try {
      if (!AnswerLookup(*plan_.table, body, plan_.form, allocate, in_place, &answer)) break;
    } catch (const Error&) {
      break;  // it will be met again, and then told
    }
    const std::string& rows = binary ? rows_ : answer.json;
    out->append("HTTP/1.1 200 OK\r\n").append(defaults).append("x-embedding-version: ");
    AppendNumber(plan_.version, out);
    if (binary) {
      out->append("\r\nx-embedding-shape: ");
      AppendNumber(answer.rows, out);
      out->push_back(',');
      AppendNumber(dim, out);
      out->append("\r\nx-embedding-missing: ");
      AppendNumber(answer.missing, out);
    }
    out->append("\r\ncontent-length: ");
    AppendNumber(static_cast<int64_t>(rows.size()), out);
    out->append(binary ? "\r\ncontent-type: application/octet-stream\r\nx-request-id: "
                       : "\r\ncontent-type: application/json\r\nx-request-id: ");
    plan_.ids->AppendNext(out);
    out->append("\r\n\r\n").append(rows);
    at += head_bytes + plan_.body_bytes;
    ++*answers;
    plan_.tally->Add(std::chrono::duration<double>(Clock::now() - began).count(),
                     static_cast<int64_t>(plan_.body_bytes), static_cast<int64_t>(rows.size()), answer.keys,
                     answer.missing);
  }
  return at;
}

}  // namespace kvtable
