#include "serving/table_answer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "serving/json_lookup.h"
#include "serving/json_rows.h"

namespace kvtable {
namespace {

// Keys as they lie in a binary body, which need not be aligned.
bool ReadBinaryKeys(std::string_view body, KeyType key_type, int64_t max_keys, std::vector<int64_t>* keys) {
  if (body.size() % 8 != 0 || static_cast<int64_t>(body.size() / 8) > max_keys) return false;
  keys->resize(body.size() / 8);
  if (!body.empty()) std::memcpy(keys->data(), body.data(), body.size());
  if (key_type != KeyType::kInt32) return true;
  return std::all_of(keys->begin(), keys->end(), [](int64_t key) {
    return key >= std::numeric_limits<int32_t>::min() && key <= std::numeric_limits<int32_t>::max();
  });
}

Combiner CombinerOf(std::string_view name) {
  return name == "sum" ? Combiner::kSum : name == "mean" ? Combiner::kMean : Combiner::kSqrtN;
}

MissingKeys MissingOf(std::string_view name, MissingKeys otherwise) {
  if (name.empty()) return otherwise;
  return name == "zeros"     ? MissingKeys::kZeros
         : name == "default" ? MissingKeys::kDefault
                             : MissingKeys::kError;
}

template <class T>
void AppendRow(const T* values, int64_t dim, KeyType key_type, int64_t key, std::string* json) {
  json->append("{\"key\":");
  json->append(key_type == KeyType::kUint64 ? std::to_string(static_cast<uint64_t>(key))
                                            : std::to_string(key));
  json->append(",\"embedding\":");
  AppendJsonRows(values, 1, dim, json);
  json->push_back('}');
}

template <class T>
void AppendAnswer(const T* values, int64_t rows, int64_t dim, const std::vector<uint8_t>& found, bool pooled,
                  int64_t missing, std::string* json) {
  json->append("{\"embeddings\":[");
  AppendJsonRows(values, rows, dim, json);
  if (pooled) {
    json->append("],\"missing\":" + std::to_string(missing) + "}");
  } else {
    json->append("],\"found\":[");
    AppendJsonFlags(found.data(), rows, json);
    json->append("]}");
  }
}

}  // namespace

bool AnswerLookup(const SnapshotTable& table, std::string_view body, const AnswerForm& form,
                  const std::function<void*(int64_t bytes)>& allocate,
                  const std::function<void(int64_t numbers, const std::function<void()>& work)>& unlocked,
                  TableAnswer* answer) {
  JsonLookup lookup;
  if (!(form.binary_keys ? ReadBinaryKeys(body, table.key_type(), form.max_keys, &lookup.keys)
                         : ReadJsonLookup(body, table.key_type(), form.max_keys, &lookup))) {
    return false;
  }
  const int64_t n = static_cast<int64_t>(lookup.keys.size()), dim = table.dim();
  const int64_t rows = lookup.pooled ? static_cast<int64_t>(lookup.splits.size()) - 1 : n;
  const int64_t numbers = std::max(n, rows) * dim;
  if (numbers > form.max_numbers) return false;

  const MissingKeys how = MissingOf(lookup.missing, form.missing);
  const bool as_floats = form.binary_rows || lookup.pooled;
  const void* missing_row = nullptr;
  if (how == MissingKeys::kDefault) {
    missing_row = table.default_row();
    // As float32 it is only there for a table of float32.
    const bool raw = !as_floats && table.value_type() == ValueType::kFloat64;
    if (missing_row == nullptr || (table.value_type() != ValueType::kFloat32 && !raw)) return false;
  }

  std::vector<uint8_t> found;
  const auto append = [&](const auto* values, int64_t missing) {
    if (form.one_row) {
      AppendRow(values, dim, table.key_type(), lookup.keys[0], &answer->json);
    } else {
      AppendAnswer(values, rows, dim, found, lookup.pooled, missing, &answer->json);
    }
  };
  std::unique_ptr<float[]> own;
  float* floats = nullptr;
  if (form.binary_rows) {
    floats = static_cast<float*>(allocate(rows * dim * static_cast<int64_t>(sizeof(float))));
  }
  int64_t missing = 0;

  const auto look_up_floats = [&] {
    if (floats == nullptr) {
      own.reset(new float[static_cast<size_t>(rows * dim)]);
      floats = own.get();
    }
    const auto* const row = static_cast<const float*>(missing_row);
    if (lookup.pooled) {
      missing = table.Pool(lookup.keys.data(), lookup.splits.data(), rows, CombinerOf(lookup.combiner),
                           lookup.weighted ? lookup.weights.data() : nullptr, floats, row);
    } else {
      missing = table.Lookup(lookup.keys.data(), n, floats, form.binary_rows ? nullptr : found.data(), row);
    }
  };
  const auto write_own = [&](auto element) {
    using T = decltype(element);
    const std::unique_ptr<T[]> values(new T[static_cast<size_t>(rows * dim)]);
    missing = table.LookupRaw(lookup.keys.data(), n, values.get(), found.data(), missing_row);
    append(values.get(), missing);
  };
  unlocked(numbers, [&] {
    if (form.binary_rows) {
      look_up_floats();
      return;
    }
    found.resize(static_cast<size_t>(lookup.pooled ? 0 : n));
    answer->json.reserve(static_cast<size_t>(rows * (dim * 12 + 16) + 64));
    if (!as_floats) {
      switch (table.value_type()) {
        case ValueType::kFloat64:
          return write_own(double{});
        case ValueType::kInt8:
          return write_own(int8_t{});
        case ValueType::kInt32:
          return write_own(int32_t{});
        case ValueType::kInt64:
          return write_own(int64_t{});
        case ValueType::kBool:
          return write_own(bool{});
        default:
          break;
      }
    }
    look_up_floats();
    append(floats, missing);
  });
  if (missing > 0 && how == MissingKeys::kError) return false;
  if (form.recent != nullptr && form.recent->Due()) form.recent->Note(lookup.keys.data(), n);
  answer->keys = n;
  answer->rows = rows;
  answer->missing = missing;
  return true;
}

// Everything in a frame is little-endian, as is every machine that the engine is built for.
namespace {

constexpr size_t kHead = 16, kTableHead = 32;
constexpr uint32_t kWeighted = 1;

struct TableHead {
  uint32_t words[4];
  uint64_t counts[2];
};
static_assert(sizeof(TableHead) == kTableHead);

size_t Aligned(size_t bytes) { return (bytes + 7) & ~size_t{7}; }

class FrameReader {
 public:
  explicit FrameReader(std::string_view body) : body_(body) {}

  // The next `count` elements of `size` bytes, null where there are fewer.
  const char* Take(uint64_t count, size_t size) {
    const size_t left = body_.size() - at_;
    if (count > left / size || Aligned(static_cast<size_t>(count) * size) > left) return nullptr;
    const char* const taken = body_.data() + at_;
    at_ += Aligned(static_cast<size_t>(count) * size);
    return taken;
  }

  bool AtEnd() const { return at_ == body_.size(); }

 private:
  std::string_view body_;
  size_t at_ = 0;
};

bool AllFinite(const float* numbers, int64_t n) {
  return std::all_of(numbers, numbers + n, [](float number) { return std::isfinite(number); });
}

}  // namespace

bool ReadFrame(std::string_view body, std::vector<FramePart>* parts, uint32_t* missing) {
  FrameReader reader(body);
  const char* const head = reader.Take(kHead, 1);
  if (head == nullptr || std::memcmp(head, "KVQ1", 4) != 0) return false;
  uint32_t words[3];
  std::memcpy(words, head + 4, sizeof(words));
  *missing = words[1];
  if (words[1] > 3 || words[2] != 0) return false;
  for (uint32_t i = 0; i < words[0]; ++i) {
    const char* const at = reader.Take(kTableHead, 1);
    if (at == nullptr) return false;
    TableHead table;
    std::memcpy(&table, at, sizeof(table));
    const auto [name_bytes, combiner, flags, zero] = table.words;
    const auto [keys, bags] = table.counts;
    if (combiner > 3 || (flags & ~kWeighted) != 0 || zero != 0) return false;
    if (combiner == 0 && (bags != 0 || flags != 0)) return false;
    FramePart part;
    const char* const name = reader.Take(name_bytes, 1);
    if (name == nullptr) return false;
    part.table = std::string_view(name, name_bytes);
    part.combiner = combiner;
    if ((part.keys_at = reader.Take(keys, 8)) == nullptr) return false;
    if (combiner != 0 && (bags == UINT64_MAX || (part.splits_at = reader.Take(bags + 1, 8)) == nullptr))
      return false;
    if (flags != 0 && (part.weights_at = reader.Take(keys, 4)) == nullptr) return false;
    part.keys = static_cast<int64_t>(keys);
    part.bags = static_cast<int64_t>(bags);
    parts->push_back(part);
  }
  return reader.AtEnd();
}

bool AnswerFrame(const std::vector<const SnapshotTable*>& tables, const std::vector<FramePart>& parts,
                 uint32_t said, const FrameLimits& limits,
                 const std::function<void*(int64_t bytes)>& allocate,
                 const std::function<void(int64_t numbers, const std::function<void()>& work)>& unlocked,
                 std::vector<int64_t>* missing) {
  const MissingKeys how = said == 0 ? limits.missing : static_cast<MissingKeys>(said - 1);
  int64_t keys = 0, numbers = 0;
  size_t bytes = kHead;
  for (size_t i = 0; i < parts.size(); ++i) {
    const FramePart& part = parts[i];
    const int64_t most = std::max(part.keys, part.bags);
    // No sum overflows: each addend is bounded by the limits before it is added.
    if (most > limits.max_keys - keys) return false;
    keys += most;
    if (most * tables[i]->dim() > limits.max_numbers - numbers) return false;
    numbers += most * tables[i]->dim();
    const int64_t rows = part.combiner != 0 ? part.bags : part.keys;
    bytes += kTableHead + Aligned(static_cast<size_t>(part.combiner != 0 ? 0 : part.keys)) +
             Aligned(static_cast<size_t>(rows * tables[i]->dim()) * sizeof(float));
    if (how == MissingKeys::kDefault &&
        (tables[i]->default_row() == nullptr || tables[i]->value_type() != ValueType::kFloat32)) {
      return false;
    }
  }
  auto* out = static_cast<char*>(allocate(static_cast<int64_t>(bytes)));
  bool fine = true;
  missing->assign(parts.size(), 0);
  unlocked(numbers, [&] {
    const uint32_t count = static_cast<uint32_t>(parts.size());
    std::memcpy(out, "KVA1", 4);
    std::memcpy(out + 4, &count, sizeof(count));
    std::memcpy(out + 8, &limits.version, sizeof(limits.version));
    out += kHead;
    JsonLookup copy;  // of arrays that are not aligned
    for (size_t i = 0; i < parts.size() && fine; ++i) {
      const FramePart& part = parts[i];
      const SnapshotTable& table = *tables[i];
      const bool pooled = part.combiner != 0;
      const int64_t rows = pooled ? part.bags : part.keys;
      fine = ReadBinaryKeys(std::string_view(part.keys_at, static_cast<size_t>(part.keys) * 8),
                            table.key_type(), part.keys, &copy.keys);
      if (!fine) return;
      const size_t found_bytes = pooled ? 0 : static_cast<size_t>(part.keys);
      const size_t row_bytes = static_cast<size_t>(rows * table.dim()) * sizeof(float);
      char* const found = out + kTableHead;
      char* const values = found + Aligned(found_bytes);
      const auto* const other =
          how == MissingKeys::kDefault ? static_cast<const float*>(table.default_row()) : nullptr;
      if (pooled) {
        copy.splits.resize(static_cast<size_t>(part.bags) + 1);
        std::memcpy(copy.splits.data(), part.splits_at, copy.splits.size() * sizeof(int64_t));
        fine = SplitsRise(copy.splits, copy.keys.size());
        if (part.weights_at != nullptr) {
          copy.weights.resize(copy.keys.size());
          if (part.keys > 0)
            std::memcpy(copy.weights.data(), part.weights_at, copy.weights.size() * sizeof(float));
          fine = fine && AllFinite(copy.weights.data(), part.keys);
        }
        if (!fine) return;
        (*missing)[i] = table.Pool(copy.keys.data(), copy.splits.data(), part.bags,
                                   static_cast<Combiner>(part.combiner - 1),
                                   part.weights_at != nullptr ? copy.weights.data() : nullptr,
                                   reinterpret_cast<float*>(values), other);
      } else {
        (*missing)[i] = table.Lookup(copy.keys.data(), part.keys, reinterpret_cast<float*>(values),
                                     reinterpret_cast<uint8_t*>(found), other);
      }
      TableHead head = {};
      head.words[0] = static_cast<uint32_t>(rows);
      head.words[1] = static_cast<uint32_t>(table.dim());
      head.words[3] = pooled;
      head.counts[0] = static_cast<uint64_t>((*missing)[i]);
      head.counts[1] = found_bytes;
      std::memcpy(out, &head, sizeof(head));
      std::memset(found + found_bytes, 0, Aligned(found_bytes) - found_bytes);
      std::memset(values + row_bytes, 0, Aligned(row_bytes) - row_bytes);
      out = values + Aligned(row_bytes);
      fine = (*missing)[i] == 0 || how != MissingKeys::kError;
    }
  });
  return fine;
}

}  // namespace kvtable
