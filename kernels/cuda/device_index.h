// The index of a table in device memory: key -> row number, in one 64-byte memory access per probe.
//
// As on the CPU (src/index.h), keys live in the bucket that their hash names or, where that is full, in the
// next one with room; a bucket counts the keys that passed it by, so that a search for an absent key ends at
// the first bucket with room that nobody passed. Every key value is legal, for what is valid stands in the
// bucket's meta word.
//
// Many threads work on it at once. What makes that simple is that one launch does one kind of thing, and
// launches on a table come one after the other:
//
//   - Searching launches change nothing, and take no precautions.
//   - In an inserting launch buckets only fill up, and a searching launch before has found the keys that are there,
//     so that it is about the others alone. Where a batch may have equal keys, whoever inserts first searches, to the
//     end; then he takes
//     the lock of the first bucket with room by replacing the very meta word that he saw there. That it is
//     still the same proves that nobody has put a key there since; all buckets before are full, without the
//     key, and stay so; and nobody puts the key in a later bucket while this one has room. So of the threads
//     that insert equal keys one does, and the others find it. The lock is held for two stores, by a thread
//     that waits for nothing; storing the meta word with the new key's bit publishes the key and gives the
//     lock back.
//     A bucket that is full is never locked, so passers-by may count themselves in its meta word at any time.
//   - In an erasing launch buckets only empty. Whoever clears a key's valid bit is the one who erased it. A
//     key that stays keeps its passages counted, so that nobody's search for it ends early.
//
// A key inserted in a launch has row number kPending until the launch is over: rows are handed out for
// all of a warp's new keys at once, and written by the next launch (see insert_kernels.h). That also tells
// which of the batch's keys are new, to each of a key's occurrences.
#pragma once

#include <cstdint>

#include "atomics.h"
#include "base/hash.h"
#include "base/host_device.h"

namespace kvtable {

inline constexpr uint32_t kNoRow = UINT32_MAX;        // the key has no row
inline constexpr uint32_t kPending = UINT32_MAX - 1;  // the key's row is not known yet

struct alignas(64) DeviceBucket {
  static constexpr int kKeys = 5;

  uint64_t keys[kKeys];
  uint32_t rows[kKeys];
  // Bits 0 to 4: the key there is valid. Bit 5: locked. Above: keys that passed by, which stays at the
  // maximum once there; that costs time and no result.
  uint32_t meta;

  static constexpr uint32_t kFull = (1u << kKeys) - 1;
  static constexpr uint32_t kLocked = 1u << kKeys;
  static constexpr uint32_t kOnePassed = kLocked << 1;
  static constexpr uint32_t kMostPassed = UINT32_MAX / kOnePassed;

  KVTABLE_HOST_DEVICE static bool IsFull(uint32_t meta) { return (meta & kFull) == kFull; }
  KVTABLE_HOST_DEVICE static uint32_t Passed(uint32_t meta) { return meta / kOnePassed; }
};
static_assert(sizeof(DeviceBucket) == 64);

// A place in the index: bucket * 8 + place in it.
using Slot = uint64_t;

// The index as kernels see it: a view that owns nothing.
struct DeviceIndex {
  DeviceBucket* buckets = nullptr;
  uint64_t num_buckets = 0;  // at least 1

  KVTABLE_HOST_DEVICE uint64_t HomeOf(uint64_t key) const { return HomeOfHash(Mix64(key)); }

  // All 64 bits of the hash scaled to [0, num_buckets). It preserves order, so that a rebuild reads and
  // writes front to back, and so that an export goes by ranges of hashes whatever the number of buckets.
  KVTABLE_HOST_DEVICE uint64_t HomeOfHash(uint64_t hash) const {
#if defined(__CUDA_ARCH__)
    return __umul64hi(hash, num_buckets);
#else
    return static_cast<uint64_t>((static_cast<unsigned __int128>(hash) * num_buckets) >> 64);
#endif
  }

  KVTABLE_HOST_DEVICE uint64_t After(uint64_t bucket) const {
    return bucket + 1 == num_buckets ? 0 : bucket + 1;
  }

  // ---- Searching launches

  // The row of `key`, or kNoRow.
  KVTABLE_HOST_DEVICE uint32_t Find(uint64_t key) const {
    const uint64_t home = HomeOf(key);
    uint64_t at = home;
    do {
      const DeviceBucket bucket = buckets[at];  // as a whole: four 16-byte loads of one line
      uint32_t row = kNoRow;
      KVTABLE_UNROLL
      for (int s = 0; s < DeviceBucket::kKeys; ++s) {
        if (bucket.keys[s] == key && (bucket.meta >> s & 1) != 0) row = bucket.rows[s];
      }
      if (row != kNoRow) return row;
      if (DeviceBucket::Passed(bucket.meta) == 0) return kNoRow;
      at = After(at);
    } while (at != home);  // erasing can leave every bucket passed by
    return kNoRow;
  }

  // ---- Inserting launches

  // Finds `key` and returns its row, which is kPending where this launch inserted it; or inserts it, sets
  // `*inserted` to where, and returns kPending. Needs room: fewer keys than places, whatever the launch adds.
  KVTABLE_HOST_DEVICE uint32_t FindOrInsert(uint64_t key, Slot* inserted, bool* is_new) const {
    const uint64_t home = HomeOf(key);
    *is_new = false;
    for (;;) {
      bool has_open = false;
      uint64_t open = 0;
      uint32_t open_meta = DeviceBucket::kLocked;
      uint64_t at = home;
      do {
        DeviceBucket& bucket = buckets[at];
        const uint32_t meta = LoadAcquire(&bucket.meta);
        const int place = PlaceOf(bucket, meta, key);
        if (place >= 0) return bucket.rows[place];
        if (!DeviceBucket::IsFull(meta)) {
          if (!has_open) {
            has_open = true;
            open = at;
            open_meta = meta;
          }
          if (DeviceBucket::Passed(meta) == 0) break;
        }
        at = After(at);
      } while (at != home);
      // Lock and unlock lie within one turn of the loop: threads of a warp that wait for one another meet at
      // its end.
      if (Append(open, open_meta, key, kPending, inserted)) {
        for (at = home; at != open; at = After(at)) CountPassage(at, true);
        *is_new = true;
        return kPending;
      }
      WaitAMoment();  // somebody was there first: what he inserted may be this key
    }
  }

  // Inserts a key that is not there, in a launch whose keys all differ, and returns where.
  KVTABLE_HOST_DEVICE Slot InsertNew(uint64_t key, uint32_t row) const {
    const uint64_t home = HomeOf(key);
    uint64_t at = home;
    Slot slot = 0;
    for (;;) {
      const uint32_t meta = LoadRelaxed(&buckets[at].meta);
      if (DeviceBucket::IsFull(meta)) {
        at = After(at);
      } else if (Append(at, meta, key, row, &slot)) {
        break;
      } else {
        WaitAMoment();
      }
    }
    for (uint64_t passed = home; passed != at; passed = After(passed)) CountPassage(passed, true);
    return slot;
  }

  // ---- Erasing launches

  // Removes a key and returns its row, or kNoRow where it is not there (any more).
  KVTABLE_HOST_DEVICE uint32_t Erase(uint64_t key) const { return EraseWhere(key, AnyRow{}); }

  // The same, if goes(row).
  template <class Goes>
  KVTABLE_HOST_DEVICE uint32_t EraseWhere(uint64_t key, const Goes& goes) const {
    const uint64_t home = HomeOf(key);
    uint64_t at = home;
    do {
      DeviceBucket& bucket = buckets[at];
      const uint32_t meta = LoadRelaxed(&bucket.meta);
      const int place = PlaceOf(bucket, meta, key);
      if (place >= 0) {
        const uint32_t row = bucket.rows[place];
        return goes(row) && EraseAt(at, place) ? row : kNoRow;
      }
      if (DeviceBucket::Passed(meta) == 0) return kNoRow;
      at = After(at);
    } while (at != home);
    return kNoRow;
  }

  // Removes the key at a place; false where somebody else did.
  KVTABLE_HOST_DEVICE bool EraseAt(uint64_t bucket, int place) const {
    const uint32_t bit = 1u << place;
    if ((FetchAnd(&buckets[bucket].meta, ~bit) & bit) == 0) return false;
    for (uint64_t at = HomeOf(buckets[bucket].keys[place]); at != bucket; at = After(at)) {
      CountPassage(at, false);
    }
    return true;
  }

 private:
  struct AnyRow {
    KVTABLE_HOST_DEVICE bool operator()(uint32_t /*row*/) const { return true; }
  };

  // Where a key is among the places of a bucket that `meta` calls valid; -1 where it is not.
  KVTABLE_HOST_DEVICE static int PlaceOf(const DeviceBucket& bucket, uint32_t meta, uint64_t key) {
    int place = -1;
#if defined(__CUDA_ARCH__) || defined(KVTABLE_EMULATES_WARPS)
    // All loads at once; what is in places that are not valid means nothing.
    uint64_t keys[DeviceBucket::kKeys];
    KVTABLE_UNROLL
    for (int s = 0; s < DeviceBucket::kKeys; ++s) keys[s] = bucket.keys[s];
    KVTABLE_UNROLL
    for (int s = 0; s < DeviceBucket::kKeys; ++s) {
      if ((meta >> s & 1) != 0 && keys[s] == key) place = s;
    }
#else
    for (int s = 0; place < 0 && s < DeviceBucket::kKeys; ++s) {
      if ((meta >> s & 1) != 0 && bucket.keys[s] == key) place = s;
    }
#endif
    return place;
  }

  // Puts a key into a bucket with room, if its meta word is still `meta`, and not locked.
  KVTABLE_HOST_DEVICE bool Append(uint64_t at, uint32_t meta, uint64_t key, uint32_t row, Slot* slot) const {
    DeviceBucket& bucket = buckets[at];
    uint32_t expected = meta;
    if ((meta & DeviceBucket::kLocked) != 0 ||
        !ReplaceAcquire(&bucket.meta, &expected, meta | DeviceBucket::kLocked)) {
      return false;
    }
    int place = 0;
    while ((meta >> place & 1) != 0) ++place;
    bucket.keys[place] = key;
    bucket.rows[place] = row;
    StoreRelease(&bucket.meta, meta | 1u << place);
    *slot = at * 8 + static_cast<uint64_t>(place);
    return true;
  }

  KVTABLE_HOST_DEVICE void CountPassage(uint64_t bucket, bool more) const {
    uint32_t* const meta = &buckets[bucket].meta;
    uint32_t seen = LoadRelaxed(meta);
    do {
      if (DeviceBucket::Passed(seen) == DeviceBucket::kMostPassed) return;
    } while (!ReplaceRelaxed(meta, &seen,
                             more ? seen + DeviceBucket::kOnePassed : seen - DeviceBucket::kOnePassed));
  }
};

}  // namespace kvtable
