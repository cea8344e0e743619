#include "serving/prepared_lookup.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstring>
#include <functional>
#include <limits>

#include "kvtable/types.h"
#include "serving/inference_request.h"
#include "serving/json_rows.h"
#include "serving/resp.h"

namespace kvtable {
namespace {

constexpr size_t kMostAtOnce = 65536;
constexpr char kJson[] = "application/json", kBinary[] = "application/octet-stream",
               kFrame[] = "application/x-kvtools-lookup";

using Clock = std::chrono::steady_clock;

void AppendNumber(int64_t number, std::string* text) {
  char digits[24];
  const char* const end = std::to_chars(digits, digits + sizeof(digits), number).ptr;
  text->append(digits, static_cast<size_t>(end - digits));
}

void InPlace(int64_t, const std::function<void()>& work) { work(); }

// Whether a table of this type can have the key, which was read as `bits`.
bool InRange(KeyType type, int64_t bits, bool negative) {
  if (type == KeyType::kUint64) return !negative;
  if (!negative && bits < 0) return false;  // 2^63 and more
  return type != KeyType::kInt32 ||
         (bits >= std::numeric_limits<int32_t>::min() && bits <= std::numeric_limits<int32_t>::max());
}

// Rows [begin, end) as JSON in the protocols of others, where NaN and the infinities are words, and no strings.
void AppendRows(const std::string& rows, int64_t begin, int64_t end, int64_t dim, std::string* text) {
  const size_t before = text->size();
  AppendJsonRows(reinterpret_cast<const float*>(rows.data()) + begin * dim, end - begin, dim, text);
  // Hardly ever there is one; and memchr is ten times as fast as std::remove.
  if (std::memchr(text->data() + before, '"', text->size() - before) == nullptr) return;
  text->erase(std::remove(text->begin() + static_cast<std::ptrdiff_t>(before), text->end(), '"'),
              text->end());
}

}  // namespace

PreparedLookup::PreparedLookup(Plan plan) : plan_(std::move(plan)) {
  std::sort(plan_.tables.begin(), plan_.tables.end(),
            [](const Table& one, const Table& other) { return one.name < other.name; });
}

const PreparedLookup::Table* PreparedLookup::Find(std::string_view name) const {
  const auto found =
      std::lower_bound(plan_.tables.begin(), plan_.tables.end(), name,
                       [](const Table& table, std::string_view of) { return table.name < of; });
  return found == plan_.tables.end() || found->name != name ? nullptr : &*found;
}

bool PreparedLookup::MakeLookup(const HeadTemplate::Values& head, std::string_view body, Made* made) {
  const Table& table = plan_.tables[0];
  const int64_t dim = table.table->dim();
  int64_t key;
  if (plan_.form.one_row) {
    bool negative;
    if (!ReadDecimal(head.key, &key, &negative)) return false;
    if (!InRange(table.table->key_type(), key, negative)) return false;
    body = {reinterpret_cast<const char*>(&key), sizeof(key)};
  } else {
    // Not more than once, where it is too much: it would be read again.
    const int64_t most = plan_.form.binary_keys ? static_cast<int64_t>(body.size() / sizeof(int64_t))
                                                : 1 + std::count(body.begin(), body.end(), ',');
    if (most * dim > plan_.form.max_numbers) return false;
  }
  const auto allocate = [this](int64_t bytes) -> void* {
    rows_.resize(static_cast<size_t>(bytes));
    return rows_.data();
  };
  TableAnswer answer;
  if (!AnswerLookup(*table.table, body, plan_.form, allocate, InPlace, &answer)) return false;
  fields_.append("x-embedding-version: ");
  AppendNumber(plan_.version, &fields_);
  fields_.append("\r\n");
  if (plan_.form.binary_rows) {
    fields_.append("x-embedding-shape: ");
    AppendNumber(answer.rows, &fields_);
    fields_.push_back(',');
    AppendNumber(dim, &fields_);
    fields_.append("\r\nx-embedding-missing: ");
    AppendNumber(answer.missing, &fields_);
    fields_.append("\r\n");
    *made = {rows_, kBinary};
  } else {
    text_ = std::move(answer.json);
    *made = {text_, kJson};
  }
  counted_.push_back({&table, answer.keys, answer.missing});
  return true;
}

bool PreparedLookup::MakeFrame(std::string_view body, Made* made) {
  std::vector<FramePart> parts;
  uint32_t said;
  if (!ReadFrame(body, &parts, &said) || parts.empty()) return false;
  std::vector<const SnapshotTable*> tables;
  for (const FramePart& part : parts) {
    const Table* const table = Find(part.table);
    if (table == nullptr) return false;
    tables.push_back(table->table);
    counted_.push_back({table, part.keys, 0});
  }
  FrameLimits limits;
  limits.missing = plan_.form.missing;
  limits.max_keys = plan_.form.max_keys;
  limits.max_numbers = plan_.form.max_numbers;
  limits.version = static_cast<uint64_t>(plan_.version);
  const auto allocate = [this](int64_t bytes) -> void* {
    rows_.resize(static_cast<size_t>(bytes));
    return rows_.data();
  };
  std::vector<int64_t> missing;
  if (!AnswerFrame(tables, parts, said, limits, allocate, InPlace, &missing)) return false;
  for (size_t i = 0; i < parts.size(); ++i) {
    counted_[i].missing = missing[i];
    RecentKeys* const recent = counted_[i].table->recent;
    if (recent == nullptr || !recent->Due() || parts[i].keys == 0) continue;
    std::vector<int64_t> keys(
        static_cast<size_t>(parts[i].keys));  // in the frame they may be at odd addresses
    std::memcpy(keys.data(), parts[i].keys_at, keys.size() * sizeof(int64_t));
    recent->Note(keys.data(), parts[i].keys);
  }
  fields_.append("x-embedding-version: ");
  AppendNumber(plan_.version, &fields_);
  fields_.append("\r\n");
  *made = {rows_, kFrame};
  return true;
}

bool PreparedLookup::LookUp(const Table& table, const std::vector<int64_t>& ids) {
  const int64_t n = static_cast<int64_t>(ids.size()), dim = table.table->dim();
  if (n > plan_.form.max_keys || n * dim > plan_.form.max_numbers) return false;
  if (table.table->key_type() == KeyType::kInt32 &&
      !std::all_of(ids.begin(), ids.end(), [](int64_t id) { return InRange(KeyType::kInt32, id, id < 0); })) {
    return false;
  }
  rows_.resize(static_cast<size_t>(n * dim) * sizeof(float));
  found_.resize(static_cast<size_t>(n));
  const int64_t missing =
      table.table->Lookup(ids.data(), n, reinterpret_cast<float*>(rows_.data()), found_.data(), nullptr);
  if (missing > 0 && plan_.form.missing == MissingKeys::kError) return false;
  if (table.recent != nullptr && table.recent->Due()) table.recent->Note(ids.data(), n);
  counted_.push_back({&table, n, missing});
  return true;
}

bool PreparedLookup::MakePredict(std::string_view body, Made* made) {
  PredictRequest request;
  if (!ReadPredict(body, plan_.form.max_keys, &request)) return false;
  const Table* const table = Find(request.signature);
  if (table == nullptr) return false;
  if (request.outputs.empty()) request.outputs = {"embeddings", "found"};
  for (const std::string_view output : request.outputs) {
    if (output != "embeddings" && output != "found") return false;
  }
  if (!LookUp(*table, request.ids)) return false;
  const int64_t n = static_cast<int64_t>(request.ids.size()), dim = table->table->dim();
  // Of the rows [begin, end): lists of numbers, or true and false.
  const auto append = [&](std::string_view output, int64_t begin, int64_t end) {
    if (output == "found") {
      AppendJsonFlags(found_.data() + begin, end - begin, &text_);
    } else {
      AppendRows(rows_, begin, end, dim, &text_);
    }
  };
  text_.assign(request.by_rows ? "{\"predictions\":" : "{\"outputs\":");
  if (request.outputs.size() == 1) {
    text_.push_back('[');
    append(request.outputs[0], 0, n);
    text_.append("]}");
  } else if (request.by_rows) {
    for (int64_t row = 0; row < n; ++row) {
      text_.append(row > 0 ? ",{\"" : "[{\"").append(request.outputs[0]).append("\":");
      append(request.outputs[0], row, row + 1);
      text_.append(",\"").append(request.outputs[1]).append("\":");
      append(request.outputs[1], row, row + 1);
      text_.push_back('}');
    }
    text_.append("]}");
  } else {
    text_.append("{\"").append(request.outputs[0]).append("\":[");
    append(request.outputs[0], 0, n);
    text_.append("],\"").append(request.outputs[1]).append("\":[");
    append(request.outputs[1], 0, n);
    text_.append("]}}");
  }
  *made = {text_, kJson};
  return true;
}

bool PreparedLookup::MakeInfer(const HeadTemplate::Values& head, std::string_view body, Made* made) {
  InferRequest request;
  const bool said = head.json_length != std::string_view::npos;
  if (!ReadInfer(body, said ? head.json_length : body.size(), plan_.form.max_keys, &request)) return false;
  const Table* const table = Find(request.signature);
  if (table == nullptr) return false;
  if (request.outputs.empty()) {
    request.outputs = {{"embeddings", request.all_binary}, {"found", request.all_binary}};
  }
  for (const InferRequest::Output& output : request.outputs) {
    if (output.name != "embeddings" && output.name != "found") return false;
  }
  if (!LookUp(*table, request.ids)) return false;
  const int64_t n = static_cast<int64_t>(request.ids.size()), dim = table->table->dim();
  text_.assign(plan_.about);
  if (request.has_id) text_.append(",\"id\":\"").append(request.id).append("\"");
  text_.append(",\"outputs\":[");
  bool first = true, any_binary = false;
  for (const InferRequest::Output& output : request.outputs) {
    const bool rows = output.name == "embeddings";
    text_.append(first ? "" : ",").append("{\"name\":\"").append(output.name);
    text_.append(rows ? "\",\"datatype\":\"FP32\",\"shape\":[" : "\",\"datatype\":\"BOOL\",\"shape\":[");
    for (size_t i = 0; i < request.shape.size(); ++i) {
      if (i > 0) text_.push_back(',');
      AppendNumber(request.shape[i], &text_);
    }
    if (rows) {
      text_.push_back(',');
      AppendNumber(dim, &text_);
    }
    text_.push_back(']');
    if (output.binary) {
      text_.append(",\"parameters\":{\"binary_data_size\":");
      AppendNumber(static_cast<int64_t>(rows ? rows_.size() : found_.size()), &text_);
      text_.push_back('}');
    } else if (rows) {
      text_.append(",\"data\":");
      AppendRows(rows_, 0, 1, n * dim, &text_);
    } else {
      text_.append(",\"data\":[");
      AppendJsonFlags(found_.data(), n, &text_);
      text_.push_back(']');
    }
    text_.push_back('}');
    first = false;
    any_binary |= output.binary;
  }
  text_.append("]}");
  if (!any_binary) {
    *made = {text_, kJson};
    return true;
  }
  fields_.append("inference-header-content-length: ");
  AppendNumber(static_cast<int64_t>(text_.size()), &fields_);
  fields_.append("\r\n");
  for (const InferRequest::Output& output : request.outputs) {
    if (!output.binary) continue;
    if (output.name == "embeddings") {
      text_.append(rows_);
    } else {
      text_.append(reinterpret_cast<const char*>(found_.data()), found_.size());
    }
  }
  *made = {text_, kBinary};
  return true;
}

bool PreparedLookup::Make(const HeadTemplate::Values& head, std::string_view body, Made* made) {
  fields_.clear();
  counted_.clear();
  switch (plan_.what) {
    case What::kLookup:
      return MakeLookup(head, body, made);
    case What::kFrame:
      return MakeFrame(body, made);
    case What::kPredict:
      return MakePredict(body, made);
    case What::kInfer:
      return MakeInfer(head, body, made);
  }
  return false;
}

size_t PreparedLookup::Answer(std::string_view data, size_t at, std::string_view defaults, std::string* out,
                              int64_t* answers) {
  *answers = 0;
  while (at < data.size() && out->size() < kMostAtOnce) {
    const Clock::time_point began = Clock::now();
    HeadTemplate::Values head;
    if (!plan_.head.Match(data.substr(at), &head)) break;
    if (data.size() - at - head.head_bytes < head.length) break;
    Made made;
    try {
      if (!Make(head, data.substr(at + head.head_bytes, head.length), &made)) break;
    } catch (const Error&) {
      break;  // it will be met again, and then told
    }
    out->append("HTTP/1.1 200 OK\r\n").append(defaults).append(fields_).append("content-length: ");
    AppendNumber(static_cast<int64_t>(made.body.size()), out);
    out->append("\r\ncontent-type: ").append(made.media_type).append("\r\nx-request-id: ");
    if (head.request_id.empty()) {
      plan_.ids->AppendNext(out);
    } else {
      out->append(head.request_id);
    }
    out->append("\r\n\r\n").append(made.body);
    at += head.head_bytes + head.length;
    ++*answers;
    const double seconds = std::chrono::duration<double>(Clock::now() - began).count();
    const auto bytes_in = static_cast<int64_t>(head.length),
               bytes_out = static_cast<int64_t>(made.body.size());
    if (counted_.size() == 1) {
      counted_[0].table->tally->Add(seconds, bytes_in, bytes_out, counted_[0].keys, counted_[0].missing);
      continue;
    }
    plan_.several->Add(seconds, bytes_in, bytes_out, 0, 0);
    for (const Counted& one : counted_) one.table->tally->AddKeys(one.keys, one.missing);
  }
  return at;
}

}  // namespace kvtable
