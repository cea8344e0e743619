#include "serving/table_answer.h"

#include <algorithm>
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

  std::unique_ptr<float[]> own;
  float* floats = nullptr;
  if (form.binary_rows) {
    floats = static_cast<float*>(allocate(rows * dim * static_cast<int64_t>(sizeof(float))));
  }
  std::vector<uint8_t> found;
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
    AppendAnswer(values.get(), rows, dim, found, false, missing, &answer->json);
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
    AppendAnswer(floats, rows, dim, found, lookup.pooled, missing, &answer->json);
  });
  if (missing > 0 && how == MissingKeys::kError) return false;
  answer->keys = n;
  answer->rows = rows;
  answer->missing = missing;
  return true;
}

}  // namespace kvtable
