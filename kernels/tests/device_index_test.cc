// The index in device memory alone, from several threads, in arrays so small that keys pass many buckets by
// and every place is taken.
#include "../cuda/device_index.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "base/hash.h"

namespace kvtable {
namespace {

constexpr int kThreads = 4;

template <class Body>
void OnThreads(const Body& body) {
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) threads.emplace_back([&body, t] { body(t); });
  for (std::thread& thread : threads) thread.join();
}

class Buckets {
 public:
  explicit Buckets(uint64_t count) : buckets_(count), index{buckets_.data(), count} {
    for (DeviceBucket& bucket : buckets_) bucket.meta = 0;
  }

  bool IsAsNew() const {
    for (const DeviceBucket& bucket : buckets_) {
      if (bucket.meta != 0) return false;
    }
    return true;
  }

 private:
  std::vector<DeviceBucket> buckets_;

 public:
  DeviceIndex index;
};

// All threads insert the same keys, each in another order; and remove them likewise.
void EveryKeyIsInsertedOnceAndRemovedOnce(uint64_t num_buckets, uint64_t keys, uint64_t seed) {
  Buckets buckets(num_buckets);
  const DeviceIndex& index = buckets.index;
  const auto key_of = [&](uint64_t i) { return i == 0 ? 0 : Mix64(seed + i); };
  for (int round = 0; round < 3; ++round) {
    std::atomic<uint64_t> inserted{0};
    OnThreads([&](int t) {
      for (uint64_t i = 0; i < keys; ++i) {
        const uint64_t n = (i + static_cast<uint64_t>(t) * keys / kThreads) % keys;
        Slot slot = 0;
        bool is_new = false;
        CHECK(index.FindOrInsert(key_of(n), &slot, &is_new) == kPending);
        if (!is_new) continue;
        ++inserted;
        CHECK(index.buckets[slot / 8].keys[slot % 8] == key_of(n));
      }
    });
    CHECK(inserted == keys);
    for (uint64_t i = 0; i < keys; ++i) CHECK(index.Find(key_of(i)) == kPending);
    CHECK(index.Find(Mix64(seed + keys + 1)) == kNoRow);

    std::atomic<uint64_t> erased{0};
    OnThreads([&](int t) {
      for (uint64_t i = 0; i < keys; ++i) {
        const uint64_t n = (i * 7 + static_cast<uint64_t>(t)) % keys;
        if (index.Erase(key_of(n)) != kNoRow) ++erased;
      }
      if (t == 0) {
        for (uint64_t i = 0; i < keys; ++i) {
          if (index.Erase(key_of(i)) != kNoRow) ++erased;
        }
      }
    });
    CHECK(erased == keys);
    CHECK(index.Find(key_of(0)) == kNoRow);
    CHECK(buckets.IsAsNew());  // each key has taken back that it passed buckets by
  }
}

void ARebuildKeepsEveryKey() {
  Buckets small(40);
  Buckets large(97);
  for (uint64_t key = 0; key < 200; ++key) small.index.InsertNew(key, static_cast<uint32_t>(key));
  OnThreads([&](int t) {
    for (uint64_t b = static_cast<uint64_t>(t); b < 40; b += kThreads) {
      for (int s = 0; s < DeviceBucket::kKeys; ++s) {
        large.index.InsertNew(small.index.buckets[b].keys[s], small.index.buckets[b].rows[s]);
      }
    }
  });
  for (uint64_t key = 0; key < 200; ++key) CHECK(large.index.Find(key) == key);
  for (uint64_t key = 200; key < 400; ++key) CHECK(large.index.Find(key) == kNoRow);
}

}  // namespace
}  // namespace kvtable

int main() {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    kvtable::EveryKeyIsInsertedOnceAndRemovedOnce(1, 5, seed << 20);
    kvtable::EveryKeyIsInsertedOnceAndRemovedOnce(3, 15, seed << 20);
    kvtable::EveryKeyIsInsertedOnceAndRemovedOnce(20, 97, seed << 20);
    kvtable::EveryKeyIsInsertedOnceAndRemovedOnce(1000, 4000, seed << 20);
  }
  kvtable::ARebuildKeepsEveryKey();
  return 0;
}
