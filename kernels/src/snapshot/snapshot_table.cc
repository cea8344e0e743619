// Lookups: groups of keys go through directory, keys and rows in stages, each of which fetches ahead for the
// next, so that many misses of the cache are on their way at once.
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/always_inline.h"
#include "base/instruction_set.h"
#include "kvtable/snapshot.h"
#include "snapshot/format.h"
#include "snapshot/mixed_index.h"
#include "snapshot/snapshot_file.h"
#include "snapshot/snapshot_level.h"
#include "values/elements.h"
#include "values/row_conversion.h"

namespace kvtable {
namespace {

namespace format = snapshot_format;

constexpr int64_t kColdGroup = 300'000;  // nanoseconds: no group takes that long whose pages are in memory
constexpr int64_t kWarmGroup =
    200'000;  // nor as little whose pages are not, even if they were asked for ahead

int64_t Nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

// Copies rows of a width that the compiler knows.
template <int64_t kBytes>
void CopyRow(const uint8_t* from, int64_t, void* to) {
  std::memcpy(to, from, kBytes);
}
void CopyAnyRow(const uint8_t* from, int64_t bytes, void* to) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

using RowCopy = void (*)(const uint8_t* from, int64_t bytes, void* to);

RowCopy BestRowCopy(int64_t bytes) {
  switch (bytes) {
    case 4:
      return CopyRow<4>;
    case 8:
      return CopyRow<8>;
    case 16:
      return CopyRow<16>;
    case 32:
      return CopyRow<32>;
    case 64:
      return CopyRow<64>;
    case 128:
      return CopyRow<128>;
    case 256:
      return CopyRow<256>;
    default:
      return CopyAnyRow;
  }
}

// Rows as float32, and added to sums.
template <class T>
void LoadElements(const void* from, int64_t n, float* to) {
  const auto* elements = static_cast<const uint8_t*>(from);
  for (int64_t i = 0; i < n; ++i) {
    T element;
    std::memcpy(&element, elements + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    to[i] = static_cast<float>(Element<T>::Load(element));
  }
}

KVTABLE_ALWAYS_INLINE inline void AddScaled(const float* row, float weight, int64_t n,
                                            float* __restrict sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] += weight * row[i];
}

using RowAdd = void (*)(const float* row, float weight, int64_t n, float* sum);  // sum += weight * row

void AddBaseline(const float* row, float weight, int64_t n, float* sum) { AddScaled(row, weight, n, sum); }
#if defined(__x86_64__)
KVTABLE_TARGET_AVX2 void AddAvx2(const float* row, float weight, int64_t n, float* sum) {
  AddScaled(row, weight, n, sum);
}
#endif

RowAdd BestRowAdd() {
#if defined(__x86_64__)
  static const RowAdd kBest = BestInstructionSet() != InstructionSet::kBaseline ? AddAvx2 : AddBaseline;
  return kBest;
#else
  return AddBaseline;
#endif
}

using RowLoad = void (*)(const void* from, int64_t n, float* to);

RowLoad BestRowLoad(ValueType type, RowForm form) {
  if (form != RowForm::kPlain) return BestRowDecode(form);
  if (type == ValueType::kFloat16 || type == ValueType::kBFloat16) {
    static const RowLoad kHalf = BestRowConversion(ValueType::kFloat16).load;
    static const RowLoad kBrain = BestRowConversion(ValueType::kBFloat16).load;
    return type == ValueType::kFloat16 ? kHalf : kBrain;
  }
  return VisitAnyValueType(type, [](auto t) -> RowLoad { return LoadElements<decltype(t)>; });
}

void AddDoubles(const uint8_t* row, double weight, int64_t n, double* sum) {
  for (int64_t i = 0; i < n; ++i) {
    double element;
    std::memcpy(&element, row + i * 8, 8);
    sum[i] += weight * element;
  }
}

// The row of an absent key.
void Fill(void* out, int64_t bytes, const void* missing) {
  if (missing == nullptr) {
    std::memset(out, 0, static_cast<size_t>(bytes));
  } else {
    std::memcpy(out, missing, static_cast<size_t>(bytes));
  }
}

}  // namespace

SnapshotTable::SnapshotTable(const SnapshotFile* file, Layout layout)
    : file_(file), layout_(std::move(layout)) {
  const auto at = [&](Section section) { return file_->data() + layout_.sections[section].offset; };
  directory_ = at(kDirectory);
  keys_ = reinterpret_cast<const uint64_t*>(at(kKeys));
  rows_ = at(kRows);
  ReadDefaultRow();
}

void SnapshotTable::ReadDefaultRow() {
  const Range& section = layout_.sections[kDefaultRow];
  const uint8_t* const from = file_->data() + section.offset;
  default_row_.resize(static_cast<size_t>(section.bytes));
  if (section.bytes > 0 && std::memcmp(default_row_.data(), from, default_row_.size()) != 0)
    std::memcpy(default_row_.data(), from, default_row_.size());
}

uint32_t SnapshotTable::generation() const { return file_->generation(); }

void SnapshotTable::CheckStill(uint32_t generation) const {
  file_->CheckUnchanged();
  if (file_->generation() == generation) return;
  throw Error(ErrorCode::kFailedPrecondition,
              "reading '" + file_->path() +
                  "': it was written over or touched meanwhile; try again, and replace a snapshot by "
                  "renaming another one to its name");
}

const void* SnapshotTable::default_row() const {
  return default_row_.empty() ? nullptr : default_row_.data();
}

template <class Entry>
void SnapshotTable::VerifyGroup(const int64_t* keys, int n, bool ask) const {
  const MixedIndex<Entry> index{static_cast<const Entry*>(directory_), keys_,
                                static_cast<uint64_t>(layout_.buckets), layout_.rows};
  constexpr int64_t kWidth = sizeof(Entry);
  int64_t bucket[kGroup], start[kGroup];
  for (int i = 0; i < n; ++i) {
    bucket[i] =
        static_cast<int64_t>(format::BucketOfMixed(Mix64(static_cast<uint64_t>(keys[i])), index.buckets));
  }
  for (int i = 0; ask && i < n; ++i) AskForUsed(kDirectory, bucket[i] * kWidth);
  for (int i = 0; i < n; ++i) VerifyUsed(kDirectory, bucket[i] * kWidth, 2 * kWidth);
  for (int i = 0; i < n; ++i) start[i] = index.Start(static_cast<uint64_t>(bucket[i]));
  for (int i = 0; ask && i < n; ++i) AskForUsed(kKeys, start[i] * 8);
  for (int i = 0; i < n; ++i) {
    const int64_t end =
        std::max(index.Start(static_cast<uint64_t>(bucket[i]) + 1), std::min(start[i] + 8, layout_.rows));
    VerifyUsed(kKeys, start[i] * 8, (end - start[i]) * 8);
  }
}

// Calls use(i, row number) for each key in its order. Rows are on their way to the cache where `rows_too`.
template <class Use>
void SnapshotTable::ForFound(const int64_t* keys, int64_t n, bool rows_too, const Use& use) const {
  const auto run = [&](auto entry) {
    using Entry = decltype(entry);
    const MixedIndex<Entry> index{static_cast<const Entry*>(directory_), keys_,
                                  static_cast<uint64_t>(layout_.buckets), layout_.rows};
    const int64_t lines = rows_too ? std::min(kLinesAhead, (layout_.row_bytes + kLine - 1) / kLine) : 0;
    const bool watched = !file_->resident.load(std::memory_order_relaxed);
    const bool verified = !file_->verify_on_use.load(std::memory_order_acquire);
    int64_t found[kGroup];
    for (int64_t first = 0; first < n; first += kGroup) {
      const int count = static_cast<int>(std::min<int64_t>(kGroup, n - first));
      const bool ask = watched && file_->cold.load(std::memory_order_relaxed);
      const int64_t began = watched ? Nanoseconds() : 0;
      if (!verified) VerifyGroup<Entry>(keys + first, count, ask);
      index.FindGroup(keys + first, count, ask, found);
      if (!verified && rows_too) {
        for (int i = 0; ask && i < count; ++i) {
          if (found[i] >= 0) AskForUsed(kRows, found[i] * layout_.row_bytes);
        }
        for (int i = 0; i < count; ++i) {
          if (found[i] >= 0) VerifyUsed(kRows, found[i] * layout_.row_bytes, layout_.row_bytes);
        }
      }
      for (int i = 0; ask && rows_too && i < count; ++i) {
        if (found[i] >= 0) AskFor(rows_ + found[i] * layout_.row_bytes, layout_.row_bytes);
      }
      if (lines > 0) {
        for (int i = 0; i < count; ++i) {
          if (found[i] < 0) continue;
          const uint8_t* const row = rows_ + found[i] * layout_.row_bytes;
          for (int64_t line = 0; line < lines; ++line) Prefetch(row + line * kLine);
          Prefetch(row + layout_.row_bytes - 1);
        }
      }
      for (int i = 0; i < count; ++i) use(first + i, found[i]);
      if (!watched) continue;
      // A few keys tell little of how fast the rest is.
      const int64_t took = (Nanoseconds() - began) * kGroup / std::max(count, kGroup / 4);
      if (!ask && took > kColdGroup) file_->cold.store(true, std::memory_order_relaxed);
      if (ask && took < kWarmGroup) file_->cold.store(false, std::memory_order_relaxed);
    }
  };
  if (layout_.wide_directory) {
    run(uint64_t{});
  } else {
    run(uint32_t{});
  }
}

// Calls use(i, row) for each key in its order, with where its row lies, or null.
template <class Use>
void SnapshotTable::ForRows(const int64_t* keys, int64_t n, const Use& use) const {
  const int64_t bytes = layout_.row_bytes;
  if (levels_.empty()) {
    ForFound(keys, n, true, [&](int64_t i, int64_t row) { use(i, row < 0 ? nullptr : rows_ + row * bytes); });
    return;
  }
  const uint8_t* rows[kGroup];
  int64_t left[kGroup];
  int at[kGroup];
  for (int64_t first = 0; first < n; first += kGroup) {
    const int count = static_cast<int>(std::min<int64_t>(kGroup, n - first));
    const int others = FindInLevels(keys + first, count, rows, left, at);
    for (int i = 0; i < count; ++i) {
      if (rows[i] != nullptr) PrefetchRow(rows[i], bytes);
    }
    ForFound(left, others, true,
             [&](int64_t i, int64_t row) { rows[at[i]] = row < 0 ? nullptr : rows_ + row * bytes; });
    for (int i = 0; i < count; ++i) use(first + i, rows[i]);
  }
}

// Finds the rows of a group of keys that some level has, or says that they are gone: null. Keys that no level knows
// are put into `left`, with their places in the group in `at`; returns how many. Their `rows` are null.
int SnapshotTable::FindInLevels(const int64_t* keys, int count, const uint8_t** rows, int64_t* left,
                                int* at) const {
  std::fill(rows, rows + count, nullptr);
  std::copy(keys, keys + count, left);
  for (int i = 0; i < count; ++i) at[i] = i;
  int others = count;
  int64_t found[kGroup];
  for (const std::shared_ptr<const SnapshotLevel>& level : levels_) {
    if (others == 0) break;
    level->Find(left, others, found);
    int kept = 0;
    for (int i = 0; i < others; ++i) {
      if (found[i] == SnapshotLevel::kUnknown) {
        left[kept] = left[i];
        at[kept++] = at[i];
      } else {
        rows[at[i]] = level->Row(found[i]);
      }
    }
    others = kept;
  }
  return others;
}

bool SnapshotTable::KeysRise(int64_t first, int64_t n, const uint64_t* mixed) const {
  const auto buckets = static_cast<uint64_t>(layout_.buckets);
  const auto start = [&](uint64_t bucket) {
    return layout_.wide_directory ? static_cast<const uint64_t*>(directory_)[bucket]
                                  : uint64_t{static_cast<const uint32_t*>(directory_)[bucket]};
  };
  for (int64_t i = 0; i < n; ++i) {
    if (first + i > 0 && mixed[i - 1] >= mixed[i]) return false;
    const uint64_t bucket = format::BucketOfMixed(mixed[i], buckets);
    const auto row = static_cast<uint64_t>(first + i);
    if (row < start(bucket) || row >= start(bucket + 1)) return false;
  }
  return true;
}

void SnapshotTable::Find(const int64_t* keys, int64_t n, int64_t* rows) const {
  file_->Reading([&] { ForFound(keys, n, false, [&](int64_t i, int64_t row) { rows[i] = row; }); });
  if (levels_.empty()) return;
  int64_t found[kGroup];
  for (int64_t first = 0; first < n; first += kGroup) {
    const int count = static_cast<int>(std::min<int64_t>(kGroup, n - first));
    int64_t before = positions();
    // The oldest level first, so that what newer ones say stays.
    for (auto level = levels_.rbegin(); level != levels_.rend(); ++level) {
      before -= (*level)->entries();
      (*level)->Find(keys + first, count, found);
      for (int i = 0; i < count; ++i) {
        if (found[i] == SnapshotLevel::kUnknown) continue;
        rows[first + i] = (*level)->Row(found[i]) == nullptr ? -1 : before + found[i];
      }
    }
  }
}

int64_t SnapshotTable::positions() const {
  int64_t positions = layout_.rows;
  for (const std::shared_ptr<const SnapshotLevel>& level : levels_) positions += level->entries();
  return positions;
}

int64_t SnapshotTable::level_bytes() const {
  int64_t bytes = 0;
  for (const std::shared_ptr<const SnapshotLevel>& level : levels_) bytes += level->bytes();
  return bytes;
}

SnapshotTable SnapshotTable::Overlaid(std::vector<std::shared_ptr<const SnapshotLevel>> levels,
                                      int64_t rows) const {
  SnapshotTable table = *this;
  for (const std::shared_ptr<const SnapshotLevel>& level : levels) {
    if (level->key_type() == key_type() && level->row_bytes() == layout_.row_bytes && !quantized()) continue;
    throw Error(ErrorCode::kInvalidArgument,
                "laying rows over table '" + layout_.name + "': they are of another type than its own");
  }
  table.levels_ = std::move(levels);
  table.live_rows_ = rows;
  // Levels have neither.
  table.layout_.frequency_type = 0;
  table.layout_.version_type = 0;
  return table;
}

// Where a row lies that Find has numbered, and its mixed key.
SnapshotTable::Place SnapshotTable::PlaceOf(int64_t number) const {
  if (number < layout_.rows) return {keys_[number], rows_ + number * layout_.row_bytes};
  number -= layout_.rows;
  for (const std::shared_ptr<const SnapshotLevel>& level : levels_) {
    if (number < level->entries()) return {level->mixed_keys()[number], level->Row(number)};
    number -= level->entries();
  }
  throw Error(ErrorCode::kInvalidArgument, "table '" + layout_.name + "' has no such row");
}

int64_t SnapshotTable::LookupRaw(const int64_t* keys, int64_t n, void* out, uint8_t* found,
                                 const void* missing) const {
  if (quantized())
    return Lookup(keys, n, static_cast<float*>(out), found, static_cast<const float*>(missing));
  const int64_t bytes = layout_.row_bytes;
  const RowCopy copy = BestRowCopy(bytes);
  auto* const to = static_cast<uint8_t*>(out);
  int64_t absent = 0;
  file_->Reading([&] {
    absent = 0;
    ForRows(keys, n, [&](int64_t i, const uint8_t* row) {
      if (row != nullptr) {
        copy(row, bytes, to + i * bytes);
      } else {
        ++absent;
        Fill(to + i * bytes, bytes, missing);
      }
      if (found != nullptr) found[i] = row != nullptr;
    });
  });
  return absent;
}

int64_t SnapshotTable::Lookup(const int64_t* keys, int64_t n, float* out, uint8_t* found,
                              const float* missing) const {
  if (layout_.value_type == ValueType::kFloat32 && !quantized())
    return LookupRaw(keys, n, out, found, missing);
  const int64_t dim = layout_.dim;
  const RowLoad load = BestRowLoad(layout_.value_type, layout_.form);
  int64_t absent = 0;
  file_->Reading([&] {
    absent = 0;
    ForRows(keys, n, [&](int64_t i, const uint8_t* row) {
      if (row != nullptr) {
        load(row, dim, out + i * dim);
      } else {
        ++absent;
        Fill(out + i * dim, dim * int64_t{sizeof(float)}, missing);
      }
      if (found != nullptr) found[i] = row != nullptr;
    });
  });
  return absent;
}

int64_t SnapshotTable::Pool(const int64_t* keys, const int64_t* splits, int64_t bags, Combiner combiner,
                            const float* weights, float* out, const float* missing) const {
  if (bags == 0) return 0;
  for (int64_t bag = 0; bag < bags; ++bag) {
    if (splits[0] != 0 || splits[bag + 1] < splits[bag]) {
      throw Error(ErrorCode::kInvalidArgument,
                  "pooling rows of table '" + layout_.name + "': splits[" + std::to_string(bag + 1) +
                      "] is " + std::to_string(splits[bag + 1]) + " after " + std::to_string(splits[bag]) +
                      "; expected numbers that rise from 0");
    }
  }
  const int64_t dim = layout_.dim;
  const bool doubles = layout_.value_type == ValueType::kFloat64;
  const bool plain = layout_.value_type == ValueType::kFloat32 && !quantized();
  const RowLoad load = BestRowLoad(layout_.value_type, layout_.form);
  const auto add = BestRowAdd();
  std::vector<float> sum(static_cast<size_t>(doubles ? 0 : dim)),
      row_of(static_cast<size_t>(plain ? 0 : dim));
  std::vector<double> wide(static_cast<size_t>(doubles ? dim : 0));
  int64_t absent = 0, bag = 0;
  double divisor = 0;
  float weight_sum = 0;
  const auto open_bag = [&] {
    std::fill(sum.begin(), sum.end(), 0.0f);
    std::fill(wide.begin(), wide.end(), 0.0);
    divisor = 0;
    weight_sum = 0;
  };

  const auto close_bag = [&] {
    float* const to = out + bag * dim;
    const bool by_weight = combiner != Combiner::kSum;
    double by = 1;
    if (by_weight) {
      by = combiner == Combiner::kMean ? (doubles ? divisor : static_cast<double>(weight_sum))
                                       : std::sqrt(doubles ? divisor : static_cast<double>(weight_sum));
    }
    for (int64_t i = 0; i < dim; ++i) {
      if (by == 0) {
        to[i] = 0;
      } else if (doubles) {
        to[i] = static_cast<float>(wide[static_cast<size_t>(i)] / by);
      } else {
        to[i] =
            by_weight ? sum[static_cast<size_t>(i)] / static_cast<float>(by) : sum[static_cast<size_t>(i)];
      }
    }
    open_bag();
    ++bag;
  };
  const auto add_row = [&](int64_t i, const uint8_t* from) {
    while (splits[bag + 1] <= i) close_bag();
    const float weight = weights == nullptr ? 1.0f : weights[i];
    const float share = combiner == Combiner::kSqrtN ? weight * weight : weight;
    divisor += share;
    weight_sum += share;
    if (from == nullptr) {
      ++absent;
      if (missing == nullptr) return;
      if (doubles) {
        for (int64_t j = 0; j < dim; ++j) wide[static_cast<size_t>(j)] += double{weight} * double{missing[j]};
      } else {
        add(missing, weight, dim, sum.data());
      }
      return;
    }
    if (doubles) {
      AddDoubles(from, weight, dim, wide.data());
    } else if (plain) {
      add(reinterpret_cast<const float*>(from), weight, dim, sum.data());
    } else {
      load(from, dim, row_of.data());
      add(row_of.data(), weight, dim, sum.data());
    }
  };

  file_->Reading([&] {
    absent = bag = 0;
    open_bag();
    ForRows(keys, splits[bags], add_row);
    while (bag < bags) close_bag();
  });
  return absent;
}

std::vector<int64_t> SnapshotTable::Numbers(int64_t first, int64_t n) {
  std::vector<int64_t> numbers(static_cast<size_t>(n));
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

void SnapshotTable::ReadKeys(int64_t first, int64_t n, int64_t* keys) const {
  if (!levels_.empty()) return TakeKeys(Numbers(first, n).data(), n, keys);
  file_->Reading([&] {
    VerifyRange(kKeys, 8, first, n);
    for (int64_t i = 0; i < n; ++i) keys[i] = static_cast<int64_t>(format::UnmixKey(keys_[first + i]));
  });
}

void SnapshotTable::TakeKeys(const int64_t* rows, int64_t n, int64_t* keys) const {
  file_->Reading([&] {
    VerifyTaken(kKeys, 8, rows, n);
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t mixed = levels_.empty() ? keys_[rows[i]] : PlaceOf(rows[i]).mixed;
      keys[i] = static_cast<int64_t>(format::UnmixKey(mixed));
    }
  });
}

void SnapshotTable::ReadRows(int64_t first, int64_t n, void* out) const {
  if (!levels_.empty()) return TakeRows(Numbers(first, n).data(), n, out);
  const uint8_t* const from = rows_ + first * layout_.row_bytes;
  file_->Reading([&] {
    VerifyRange(kRows, layout_.row_bytes, first, n);
    if (quantized()) {
      const RowDecode decode = BestRowDecode(layout_.form);
      for (int64_t i = 0; i < n; ++i) {
        decode(from + i * layout_.row_bytes, layout_.dim, static_cast<float*>(out) + i * layout_.dim);
      }
    } else if (n > 0) {
      std::memcpy(out, from, static_cast<size_t>(n * layout_.row_bytes));
    }
  });
}

void SnapshotTable::TakeRows(const int64_t* rows, int64_t n, void* out) const {
  auto* const to = static_cast<uint8_t*>(out);
  const RowDecode decode = quantized() ? BestRowDecode(layout_.form) : nullptr;
  file_->Reading([&] {
    VerifyTaken(kRows, layout_.row_bytes, rows, n);
    for (int64_t i = 0; !levels_.empty() && i < n; ++i) {
      Fill(to + i * layout_.row_bytes, layout_.row_bytes, PlaceOf(rows[i]).row);
    }
    for (int64_t i = 0; levels_.empty() && i < n; ++i) {
      if (i + kGroup < n) Prefetch(rows_ + rows[i + kGroup] * layout_.row_bytes);
      const uint8_t* const from = rows_ + rows[i] * layout_.row_bytes;
      if (decode != nullptr) {
        decode(from, layout_.dim, static_cast<float*>(out) + i * layout_.dim);
      } else {
        std::memcpy(to + i * layout_.row_bytes, from, static_cast<size_t>(layout_.row_bytes));
      }
    }
  });
}

void SnapshotTable::ReadColumn(Section section, int64_t bytes, int64_t first, int64_t n, void* out) const {
  const uint8_t* const column = file_->data() + layout_.sections[section].offset;
  file_->Reading([&] {
    VerifyRange(section, bytes, first, n);
    if (n > 0) std::memcpy(out, column + first * bytes, static_cast<size_t>(n * bytes));
  });
}

void SnapshotTable::TakeColumn(Section section, int64_t bytes, const int64_t* rows, int64_t n,
                               void* out) const {
  const uint8_t* const column = file_->data() + layout_.sections[section].offset;
  auto* const to = static_cast<uint8_t*>(out);
  file_->Reading([&] {
    VerifyTaken(section, bytes, rows, n);
    for (int64_t i = 0; i < n; ++i)
      std::memcpy(to + i * bytes, column + rows[i] * bytes, static_cast<size_t>(bytes));
  });
}

}  // namespace kvtable
