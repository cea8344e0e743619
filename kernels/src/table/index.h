// The index of one shard: key -> row number, in one cache line per probe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/always_inline.h"
#include "base/hash.h"
#include "memory/equal_slots.h"
#include "memory/prefetch.h"
#include "table/far_keys.h"

namespace kvtable {

// Seven keys, as their hashes, and their rows. Mix64 is a bijection, so a hash is its key; and what a bucket's number says
// of a hash need not be stored again (a quotient, as in Cleary, "Compact hash tables using bidirectional linear probing",
// 1984): the bits that it tells are the row's.
struct alignas(64) Bucket {
  static constexpr int kKeys = 7;
  static constexpr int kCountBits = 3;
  static constexpr uint8_t kMostPassed = UINT8_MAX >> kCountBits;

  uint64_t words[kKeys];  // a hash, whose highest bits of the lower half make room for the lowest of the row
  uint8_t rows[kKeys];    // the other bits of the row
  uint8_t state;          // how many words are valid, and how many keys passed by

  int count() const { return state & ((1 << kCountBits) - 1); }
  // Stays at the maximum once there, which costs time and no result.
  int passed() const { return state >> kCountBits; }
};
static_assert(sizeof(Bucket) == 64);

// A bucket, and which bits of its words are of rows: in one word, as buckets are aligned.
class BucketRef {
 public:
  BucketRef() = default;
  BucketRef(const Bucket* bucket, int row_bits)
      : word_(reinterpret_cast<uintptr_t>(bucket) | static_cast<uintptr_t>(32 - row_bits)) {}

  explicit operator bool() const { return word_ != 0; }
  bool operator==(const BucketRef& other) const { return word_ == other.word_; }
  bool operator!=(const BucketRef& other) const { return word_ != other.word_; }
  const Bucket* bucket() const {
    return reinterpret_cast<const Bucket*>(word_ & ~uintptr_t{sizeof(Bucket) - 1});
  }
  Bucket* writable() const { return const_cast<Bucket*>(bucket()); }
  BucketRef Plus(uint32_t buckets) const {
    BucketRef there;
    there.word_ = word_ + uintptr_t{buckets} * sizeof(Bucket);
    return there;
  }

  // The bits of a row that lie in its word are those from this one on, of the lower half.
  int row_shift() const { return static_cast<int>(word_ & (sizeof(Bucket) - 1)); }
  uint64_t row_mask() const { return static_cast<uint32_t>(uint64_t{UINT32_MAX} << row_shift()); }
  // The row of the i-th key.
  uint32_t Row(int i) const {
    const uint64_t low = static_cast<uint32_t>(bucket()->words[i]);
    return static_cast<uint32_t>((uint64_t{bucket()->rows[i]} << 32 | low) >> row_shift());
  }

 private:
  uintptr_t word_ = 0;
};

// Keys live in the bucket their hash names, or, where that is full, in the next one with room of the kReach that begin
// there, or else among the far ones. A bucket counts the keys that passed it by on the way to their place, so a search
// for an absent key ends at the first bucket that nobody passed, and a removal needs no tombstone: it takes its own
// passage back.
class BucketIndex {
 public:
  static constexpr uint32_t kNoRow = UINT32_MAX;
  static constexpr uint32_t kReach = 16;

  // The owner of this number takes its memory of `slots`.
  BucketIndex(std::shared_ptr<EqualSlots> slots, int owner) : slots_(std::move(slots)), owner_(owner) {}
  BucketIndex(const BucketIndex&) = delete;
  BucketIndex& operator=(const BucketIndex&) = delete;

  // The bucket a search begins at. What Find reads first: prefetch it.
  BucketRef Home(uint64_t hash) const { return first_.Plus(BucketOf(hash, num_buckets_)); }

  // The row of the key of this hash if it is in this bucket, or kNoRow.
  static uint32_t Match(uint64_t hash, BucketRef at) {
    const int i = Which(hash, at);
    return i < 0 ? kNoRow : at.Row(i);
  }

  // Where the search goes on from a bucket without the key, or null where no bucket has it: then, if keys passed this one
  // by, it may be a far one.
  BucketRef Next(BucketRef at, BucketRef home) const {
    if (at.bucket()->passed() == 0) return {};
    const BucketRef next = After(at);
    return next == home || Distance(home, next) == kReach ? BucketRef() : next;
  }

  // The row of a key that passed all the buckets within reach, or kNoRow.
  uint32_t FindFar(uint64_t hash) const { return far_.size() == 0 ? kNoRow : far_.Find(hash); }

  // The row of the key of this hash, or kNoRow, searched for from a bucket on.
  uint32_t FindFrom(uint64_t hash, BucketRef at, BucketRef home) const {
    for (;;) {
      const uint32_t row = Match(hash, at);
      if (row != kNoRow || at.bucket()->passed() == 0) return row;
      const BucketRef next = Next(at, home);
      if (!next) return FindFar(hash);
      at = next;
    }
  }

  uint32_t Find(uint64_t hash) const { return FindFrom(hash, Home(hash), Home(hash)); }

  // Makes room for one more key with this row, so that the next Insert cannot fail: also for the bits of the row, of which
  // the rows of a RowStore, no more than there ever were keys, never have too many. Throws Error(kResourceExhausted).
  void PrepareInsert(uint32_t row) {
    if (size_ >= max_size_ || uint64_t{row} << first_.row_shift() >> 40 != 0 || stuck_ > most_stuck_ ||
        slots_->BehindOthers(memory_.bytes())) {
      MakeRoom(row);
    }
    far_.PrepareInsert();
  }

  // Adds a key that is not there. Needs PrepareInsert() first.
  void Insert(uint64_t hash, uint32_t row) noexcept;

  // Removes a key and returns its row, or kNoRow.
  uint32_t Erase(uint64_t hash) noexcept;
  // Asks for what Erase reads after the home, which is there by now.
  KVTABLE_ALWAYS_INLINE void PrefetchErase(uint64_t hash) const {
    const Bucket* const home = Home(hash).bucket();
    PrefetchToWrite(home + (home->passed() > 0 ? 1 : 0));
  }

  // Makes room for `keys` keys in all; the owners of other slots are to do so, too.
  void Reserve(size_t keys);
  void Clear();

  size_t size() const { return size_; }
  size_t bytes() const { return memory_.bytes() + far_.bytes(); }

  // The most buckets that a search for a key in the index reads; far keys are one more.
  int MaxProbeLength() const;
  size_t far_keys() const { return far_.size(); }

 private:
  static size_t MaxKeys(uint32_t buckets);
  // Which of a bucket's keys has this hash; -1: none.
  static int Which(uint64_t hash, BucketRef at) {
    // All seven are compared, whatever the count, so that no branch depends on it.
    const Bucket& bucket = *at.bucket();
    const uint64_t of_hash = ~at.row_mask();
    uint32_t hits = 0;
    for (int i = 0; i < Bucket::kKeys; ++i) {
      hits |= static_cast<uint32_t>(((bucket.words[i] ^ hash) & of_hash) == 0) << i;
    }
    const uint32_t valid = hits & ((1u << bucket.count()) - 1);
    return valid != 0 ? __builtin_ctz(valid) : -1;
  }
  BucketRef After(BucketRef at) const {
    const BucketRef next = at.Plus(1);
    return next == first_.Plus(num_buckets_) ? first_ : next;
  }
  uint32_t Distance(BucketRef home, BucketRef at) const {
    const auto buckets =
        static_cast<uint32_t>(at.bucket() - home.bucket());  // or this less than 2 to the 32nd
    return at.bucket() >= home.bucket() ? buckets : buckets + num_buckets_;
  }
  // The lower half of the highest hash whose home a bucket is.
  uint32_t LastOf(uint32_t bucket) const {
    const uint64_t end = ((uint64_t{bucket} + 1) << 32) + num_buckets_ - 1;
    return static_cast<uint32_t>(end / num_buckets_ - 1);
  }
  // How far before `last`, the LastOf a bucket, the lower half of the hash is that a word of it stands for. The homes of a
  // bucket's keys are it and at most kReach - 1 before it, and only one hash with one of these homes has the bits that
  // are in the word.
  uint32_t BackFrom(uint32_t last, uint64_t word) const {
    return (last - static_cast<uint32_t>(word)) & ~static_cast<uint32_t>(first_.row_mask());
  }
  uint32_t NumberOf(BucketRef at) const { return static_cast<uint32_t>(at.bucket() - first_.bucket()); }
  // Adds a key to a bucket with room, and takes one out.
  static void Put(BucketRef at, uint64_t word, uint8_t row) noexcept;
  static void TakeOut(BucketRef at, int i) noexcept;
  // Fills the hole that a key left by one that passed it by, and so on: keys that come and go leave the others as near to
  // their homes as if they had never been there.
  void MoveUp(BucketRef hole) noexcept;
  // Counts, or no longer counts, a key that passes a bucket by.
  void Pass(BucketRef at) noexcept;
  void TakeBack(BucketRef at) noexcept;
  BucketIndex& operator=(BucketIndex&&) = default;
  // Calls visit(hash, row, buckets that a search for it reads).
  template <class Visit>
  void ForEach(const Visit& visit) const;
  void MakeRoom(uint32_t row);
  void Rebuild(uint32_t new_buckets);

  static Bucket empty_bucket_;  // what an index with no memory of its own searches; never written

  BucketRef first_{&empty_bucket_, 0};
  uint32_t num_buckets_ = 1;
  FarKeys far_;
  std::shared_ptr<EqualSlots> slots_;
  int owner_;
  EqualSlots::Slot memory_;
  size_t size_ = 0;
  size_t max_size_ = 0;
  size_t stuck_ = 0;  // buckets that count no more who passes
  size_t most_stuck_ = 0;
};

}  // namespace kvtable
