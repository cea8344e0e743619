#include "table/index.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kvtable/types.h"

namespace kvtable {
namespace {

constexpr uint32_t kMinBuckets = 4;
constexpr uint32_t kMaxBuckets = uint32_t{1} << 31;  // more than rows can fill
// One in 14 keys of a full index lies outside its home bucket, and right after growth it costs
// 64 / 7 / (kMaxLoad / kGrowth) = 14.6 bytes per key. Growth is a stream, so small steps are cheap.
constexpr double kMaxLoad = 0.75;
constexpr double kGrowth = 1.2;

// As many as the buckets from a home on tell of a hash: so the number of buckets, less those within reach.
int RowBits(uint32_t buckets) {
  static_assert(BucketIndex::kReach == 1u << 4);
  return buckets < BucketIndex::kReach ? 0 : 31 - __builtin_clz(buckets) - 4;
}

}  // namespace

Bucket BucketIndex::empty_bucket_ = {};

size_t BucketIndex::MaxKeys(uint32_t buckets) {
  return static_cast<size_t>(static_cast<double>(buckets) * Bucket::kKeys * kMaxLoad);
}

template <class Visit>
void BucketIndex::ForEach(const Visit& visit) const {
  for (uint32_t b = 0; b < num_buckets_; ++b) {
    const BucketRef at = first_.Plus(b);
    const uint32_t last = LastOf(b);
    for (int i = 0; i < at.bucket()->count(); ++i) {
      const uint64_t word = at.bucket()->words[i];
      const uint64_t hash =
          (word & ~uint64_t{UINT32_MAX}) | static_cast<uint32_t>(last - BackFrom(last, word));
      visit(hash, at.Row(i), Distance(Home(hash), at) + 1);
    }
  }
  far_.ForEach([&](uint64_t hash, uint32_t row) { visit(hash, row, kReach + 1); });
}

void BucketIndex::Pass(BucketRef at) noexcept {
  Bucket* const bucket = at.writable();
  if (bucket->passed() == Bucket::kMostPassed) return;
  bucket->state = static_cast<uint8_t>(bucket->state + (1 << Bucket::kCountBits));
  stuck_ += bucket->passed() == Bucket::kMostPassed ? 1 : 0;
}

void BucketIndex::TakeBack(BucketRef at) noexcept {
  Bucket* const bucket = at.writable();
  if (bucket->passed() == Bucket::kMostPassed) return;
  bucket->state = static_cast<uint8_t>(bucket->state - (1 << Bucket::kCountBits));
}

void BucketIndex::Insert(uint64_t hash, uint32_t row) noexcept {
  ++size_;
  BucketRef at = Home(hash);
  for (uint32_t passed = 0; at.bucket()->count() == Bucket::kKeys;) {
    Pass(at);
    if (++passed == kReach) return far_.Insert(hash, row);
    at = After(at);
  }
  const uint64_t of_row = at.row_mask();
  const uint64_t shifted = uint64_t{row} << at.row_shift();
  Put(at, (hash & ~of_row) | (shifted & of_row), static_cast<uint8_t>(shifted >> 32));
}

void BucketIndex::Put(BucketRef at, uint64_t word, uint8_t row) noexcept {
  Bucket* const bucket = at.writable();
  const int i = bucket->count();
  bucket->words[i] = word;
  bucket->rows[i] = row;
  ++bucket->state;
}

uint32_t BucketIndex::Erase(uint64_t hash) noexcept {
  const BucketRef home = Home(hash);
  BucketRef at = home;
  int i = Which(hash, at);
  while (i < 0) {
    const BucketRef next = Next(at, home);
    if (!next) break;
    at = next;
    i = Which(hash, at);
  }
  uint32_t row;
  BucketRef end = at;  // of the buckets that the key passed
  if (i >= 0) {
    row = at.Row(i);
    TakeOut(at, i);
  } else {
    row = far_.Erase(hash);
    if (row == kNoRow) return row;
    end = After(at);
  }
  --size_;
  for (BucketRef passed = home; passed != end; passed = After(passed)) TakeBack(passed);
  if (i >= 0) MoveUp(at);
  return row;
}

void BucketIndex::TakeOut(BucketRef at, int i) noexcept {
  Bucket* const bucket = at.writable();
  const int last = bucket->count() - 1;
  bucket->words[i] = bucket->words[last];
  bucket->rows[i] = bucket->rows[last];
  --bucket->state;
}

void BucketIndex::MoveUp(BucketRef hole) noexcept {
  BucketRef at = After(hole);
  for (uint32_t away = 1; hole.bucket()->passed() > 0 && at != hole && away < kReach;
       ++away, at = After(at)) {
    const uint32_t last = LastOf(NumberOf(at));
    const uint32_t of_others = last - LastOf(NumberOf(hole));  // hashes with homes after the hole
    for (int i = 0; i < at.bucket()->count(); ++i) {
      if (BackFrom(last, at.bucket()->words[i]) < of_others) continue;  // it did not pass the hole
      Put(hole, at.bucket()->words[i], at.bucket()->rows[i]);
      for (; hole != at; hole = After(hole)) TakeBack(hole);
      TakeOut(at, i);
      away = 0;
      break;
    }
  }
}

void BucketIndex::Reserve(size_t keys) {
  if (keys <= max_size_) return;
  const double buckets = static_cast<double>(keys) / (Bucket::kKeys * kMaxLoad) + 1;
  if (buckets >= static_cast<double>(kMaxBuckets)) {
    throw Error(ErrorCode::kResourceExhausted,
                "One shard of a table was to index " + std::to_string(keys) + " keys. Partition the table.");
  }
  const uint32_t wanted = std::max(kMinBuckets, static_cast<uint32_t>(buckets));
  slots_->Prepare(size_t{wanted} * sizeof(Bucket));
  Rebuild(wanted);
}

void BucketIndex::MakeRoom(uint32_t row) {
  double buckets = num_buckets_;
  if (size_ >= max_size_) buckets = buckets * kGrowth + 1;
  buckets = std::max({buckets, static_cast<double>(kMinBuckets), row / 8 + 1.0});
  Rebuild(static_cast<uint32_t>(std::min(buckets, static_cast<double>(kMaxBuckets))));
}

// Old buckets come in the order of hashes, and BucketOf keeps that order: both arrays are walked front to
// back, at the speed of a copy.
void BucketIndex::Rebuild(uint32_t new_buckets) {
  BucketIndex next(slots_, owner_);
  next.memory_ = slots_->Take(owner_, size_t{new_buckets} * sizeof(Bucket));
  next.num_buckets_ =
      static_cast<uint32_t>(std::min<size_t>(next.memory_.bytes() / sizeof(Bucket), kMaxBuckets));
  next.first_ = BucketRef(reinterpret_cast<Bucket*>(next.memory_.data()), RowBits(next.num_buckets_));
  next.max_size_ = MaxKeys(next.num_buckets_);
  ForEach([&](uint64_t hash, uint32_t row, uint32_t) {
    next.far_.PrepareInsert();
    next.Insert(hash, row);
  });
  // Those that are stuck so soon are so because of their keys; to count anew would help little, unless they double.
  next.most_stuck_ = 2 * next.stuck_ + next.num_buckets_ / 64 + 1;
  *this = std::move(next);
}

void BucketIndex::Clear() { *this = BucketIndex(slots_, owner_); }

int BucketIndex::MaxProbeLength() const {
  uint32_t longest = 0;
  ForEach([&](uint64_t, uint32_t, uint32_t probes) { longest = std::max(longest, probes); });
  return static_cast<int>(longest);
}

}  // namespace kvtable
