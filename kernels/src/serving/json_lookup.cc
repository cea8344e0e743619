#include "serving/json_lookup.h"

#include <utility>

#include "serving/json_reader.h"

namespace kvtable {
namespace {

bool ReadKey(JsonReader& reader, KeyType key_type, int64_t* key) {
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
bool ReadElements(JsonReader& reader, size_t most, std::vector<Element>* all, std::vector<int64_t>* splits,
                  const Read& read) {
  const auto one = [&] {
    Element element;
    if (all->size() == most || !read(&element)) return false;
    all->push_back(element);
    return true;
  };
  // Which of the two it is, the first element tells.
  JsonReader ahead = reader;
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
  JsonReader reader(body);
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
