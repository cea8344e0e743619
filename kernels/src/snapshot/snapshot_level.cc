#include "snapshot/snapshot_level.h"

#include <cstring>
#include <string>
#include <system_error>
#include <thread>

#include "kvtable/parallel_for.h"
#include "snapshot/key_sorter.h"

namespace kvtable {
namespace {

namespace format = snapshot_format;

constexpr int64_t kLetGoAtOnce = int64_t{16} << 20;  // bytes that take less time than a thread for them does

}  // namespace

std::shared_ptr<SnapshotLevel> SnapshotLevel::New(KeyType key_type, int64_t row_bytes) {
  // Whoever used a level last may be the one that answers all requests: what is large is freed beside it.
  return {new SnapshotLevel(key_type, row_bytes), [](SnapshotLevel* level) {
            if (level->bytes() > kLetGoAtOnce) {
              try {
                std::thread([level] { delete level; }).detach();
                return;
              } catch (const std::system_error&) {  // no thread to be had
              }
            }
            delete level;
          }};
}

std::shared_ptr<const SnapshotLevel> SnapshotLevel::Make(const SnapshotTable& table, const int64_t* keys,
                                                         int64_t n, const void* values,
                                                         const int64_t* removed, int64_t m) {
  const std::string doing = "laying rows over table '" + table.name() + "': ";
  if (table.quantized()) throw Error(ErrorCode::kInvalidArgument, doing + "its own are quantized");
  if (n + m >= int64_t{kRemoved}) {
    throw Error(ErrorCode::kInvalidArgument, doing + std::to_string(n + m) + " keys are too many at once");
  }
  const std::shared_ptr<SnapshotLevel> level = New(table.key_type(), table.layout().row_bytes);
  std::vector<MixedKey> entries(static_cast<size_t>(n + m));
  for (int64_t i = 0; i < n + m; ++i) {
    const int64_t key = i < n ? keys[i] : removed[i - n];
    entries[static_cast<size_t>(i)] = {Mix64(static_cast<uint64_t>(key)), static_cast<uint64_t>(i)};
  }
  SortMixedKeys(entries.data(), n + m, Serial());
  level->keys_.reserve(entries.size());
  level->places_.reserve(entries.size());
  for (const MixedKey& entry : entries) {
    const bool has_row = entry.row < static_cast<uint64_t>(n);
    if (!level->keys_.empty() && level->keys_.back() == entry.mixed) {
      if (!has_row) continue;  // it came again, or is named twice as gone
      throw Error(ErrorCode::kInvalidArgument,
                  doing + "key " + std::to_string(static_cast<int64_t>(format::UnmixKey(entry.mixed))) +
                      " comes twice");
    }
    level->keys_.push_back(entry.mixed);
    level->places_.push_back(has_row ? static_cast<uint32_t>(entry.row) : kRemoved);
  }
  level->rows_kept_ = n;
  level->rows_ = Region(static_cast<size_t>(n * level->row_bytes_), Pages::kHuge, "laying rows over a table");
  if (n > 0) std::memcpy(level->rows_.data(), values, static_cast<size_t>(n * level->row_bytes_));
  level->MakeDirectory();
  return level;
}

std::shared_ptr<const SnapshotLevel> SnapshotLevel::Merge(const SnapshotLevel& older,
                                                          const SnapshotLevel& newer) {
  if (older.key_type_ != newer.key_type_ || older.row_bytes_ != newer.row_bytes_) {
    throw Error(ErrorCode::kInvalidArgument, "merging levels: they are of different tables");
  }
  const std::shared_ptr<SnapshotLevel> level = New(newer.key_type_, newer.row_bytes_);
  level->keys_.reserve(older.keys_.size() + newer.keys_.size());
  level->places_.reserve(level->keys_.capacity());
  // As many as there can be: memory that is not touched is not taken.
  level->rows_ = Region(static_cast<size_t>((older.rows_kept_ + newer.rows_kept_) * level->row_bytes_),
                        Pages::kOrdinary, "merging rows that lie over a table");
  auto* const to = reinterpret_cast<uint8_t*>(level->rows_.data());
  uint32_t kept = 0;
  const auto add = [&](uint64_t key, const uint8_t* row) {
    level->keys_.push_back(key);
    level->places_.push_back(row == nullptr ? kRemoved : kept);
    if (row == nullptr) return;
    std::memcpy(to + kept * level->row_bytes_, row, static_cast<size_t>(level->row_bytes_));
    ++kept;
  };
  if (older.entries() + newer.entries() >= int64_t{kRemoved}) {
    throw Error(ErrorCode::kInvalidArgument, "merging levels: too many keys");
  }
  int64_t o = 0, n = 0;
  while (o < older.entries() || n < newer.entries()) {
    const bool from_newer =
        o == older.entries() || (n < newer.entries() && newer.mixed_keys()[n] <= older.mixed_keys()[o]);
    if (from_newer) {
      if (o < older.entries() && older.mixed_keys()[o] == newer.mixed_keys()[n]) ++o;
      add(newer.mixed_keys()[n], newer.Row(n));
      ++n;
    } else {
      add(older.mixed_keys()[o], older.Row(o));
      ++o;
    }
  }
  level->rows_kept_ = kept;
  level->MakeDirectory();
  return level;
}

void SnapshotLevel::MakeDirectory() {
  const uint64_t buckets =
      std::max<uint64_t>(1, (keys_.size() + format::kKeysPerBucket - 1) / format::kKeysPerBucket);
  directory_.reserve(buckets + 1);
  for (size_t i = 0; i < keys_.size(); ++i) {
    const uint64_t own = format::BucketOfMixed(keys_[i], buckets);
    while (directory_.size() <= own) directory_.push_back(static_cast<uint32_t>(i));
  }
  while (directory_.size() <= buckets) directory_.push_back(static_cast<uint32_t>(keys_.size()));
}

int64_t SnapshotLevel::bytes() const {
  return static_cast<int64_t>(keys_.capacity() * sizeof(uint64_t) +
                              (places_.capacity() + directory_.capacity()) * sizeof(uint32_t)) +
         rows_kept_ * row_bytes_;
}

void SnapshotLevel::Find(const int64_t* keys, int n, int64_t* entries) const {
  const MixedIndex<uint32_t> index{directory_.data(), keys_.data(), directory_.size() - 1, this->entries()};
  index.FindGroup(keys, n, false, entries);
  for (int i = 0; i < n; ++i) {
    if (entries[i] >= 0) Prefetch(places_.data() + entries[i]);
  }
}

bool MergedRows::Next(uint64_t* mixed, const uint8_t** row) {
  const uint64_t* const own = table_.mixed_keys();
  const int64_t rows = table_.layout().rows, entries = level_ == nullptr ? 0 : level_->entries();
  while (in_table_ < rows || in_level_ < entries) {
    if (in_level_ == entries || (in_table_ < rows && own[in_table_] < level_->mixed_keys()[in_level_])) {
      *mixed = own[in_table_];
      *row = table_.stored_rows() + in_table_ * table_.layout().row_bytes;
      ++in_table_;
      return true;
    }
    *mixed = level_->mixed_keys()[in_level_];
    if (in_table_ < rows && own[in_table_] == *mixed) ++in_table_;
    *row = level_->Row(in_level_++);
    if (*row != nullptr) return true;
  }
  return false;
}

std::shared_ptr<const SnapshotLevel> MergedLevel(const SnapshotTable& table) {
  // The smallest ones, which are the newest, first.
  std::shared_ptr<const SnapshotLevel> merged;
  for (const std::shared_ptr<const SnapshotLevel>& level : table.levels()) {
    merged = merged == nullptr ? level : SnapshotLevel::Merge(*level, *merged);
  }
  return merged;
}

}  // namespace kvtable
