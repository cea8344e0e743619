// Slots of owners that grow alike: zeroed, apart, on pages that they share, and given back.
#include "memory/equal_slots.h"

#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"

namespace kvtable {
namespace {

constexpr int kOwners = 16;

// One owner: all of its memory has its mark.
struct Owner {
  EqualSlots::Slot slot;
  char mark = 0;

  void CheckMarks() const {
    for (size_t i = 0; i < slot.bytes(); i += 64)
      CHECK(slot.data()[i] == mark && slot.data()[i + 63] == mark);
  }
  void Take(EqualSlots* slots, int owner, size_t bytes) {
    EqualSlots::Slot next = slots->Take(owner, bytes);
    CHECK(next.bytes() >= bytes && reinterpret_cast<uintptr_t>(next.data()) % 64 == 0);
    for (size_t i = 0; i < next.bytes(); i += 64) CHECK(next.data()[i] == 0 && next.data()[i + 63] == 0);
    CheckMarks();
    slot = std::move(next);
    mark = static_cast<char>(mark % 100 + 1 + owner);
    std::memset(slot.data(), mark, slot.bytes());
  }
};

// As an index grows: by a fifth, or as far as others are.
void Grow(EqualSlots* slots, int number, Owner* owner) {
  const size_t bytes = owner->slot.bytes();
  owner->Take(slots, number, slots->BehindOthers(bytes) ? bytes : (bytes + bytes / 5) / 64 * 64 + 64);
}

void OwnersHaveMemoryOfTheirOwn() {
  for (const int owners : {1, 2, 16, 23, 64}) {
    for (const bool huge_pages : {false, true}) {
      EqualSlots slots(owners, huge_pages, "a test");
      std::vector<Owner> all(static_cast<size_t>(owners));
      for (size_t most = 0; most < (size_t{8} << 20) / static_cast<size_t>(owners);) {
        for (int o = 0; o < owners; ++o) {
          Grow(&slots, o, &all[static_cast<size_t>(o)]);
          most = std::max(most, all[static_cast<size_t>(o)].slot.bytes());
        }
        for (const Owner& one : all) one.CheckMarks();
      }
      // All are in one block by now, if in any.
      const size_t bytes = all[0].slot.bytes();
      for (int o = 0; o < owners; ++o) {
        CHECK(all[static_cast<size_t>(o)].slot.bytes() == bytes);
        const char* const data = all[static_cast<size_t>(o)].slot.data();
        if (owners >= 16 && huge_pages) CHECK(data == all[0].slot.data() + static_cast<size_t>(o) * bytes);
      }
      CHECK(!slots.BehindOthers(bytes) && slots.idle_bytes() == 0);
      all.clear();
      CHECK(slots.idle_bytes() == 0 && !slots.BehindOthers(bytes - 64));
    }
  }
}

// An owner of much does not give the others as much, and one that begins anew has little.
void OwnersThatAreNotAlike() {
  constexpr size_t kBytes = size_t{1} << 20;
  EqualSlots slots(kOwners, true, "a test");
  std::vector<Owner> all(kOwners);
  for (int o = 0; o < kOwners; ++o) all[static_cast<size_t>(o)].Take(&slots, o, kBytes);
  all[0].Take(&slots, 0, 4 * kBytes);
  CHECK(!slots.BehindOthers(kBytes) && all[0].slot.bytes() == 4 * kBytes);
  slots.Prepare(kBytes + kBytes / 4);
  CHECK(slots.BehindOthers(kBytes) && !slots.BehindOthers(kBytes / 2) && !slots.BehindOthers(4 * kBytes));
  for (int o = 1; o < kOwners; ++o) all[static_cast<size_t>(o)].Take(&slots, o, kBytes);
  CHECK(all[7].slot.bytes() == kBytes + kBytes / 4 && slots.idle_bytes() == 0);
  CHECK(all[7].slot.data() - all[1].slot.data() == 6 * static_cast<int64_t>(all[7].slot.bytes()));
  // What it had is of others' pages in part; and there it comes back, zeroed.
  const char* const was = all[3].slot.data();
  all[3].Take(&slots, 3, 64);
  CHECK(all[3].slot.bytes() == 64 && slots.idle_bytes() > 0 && slots.idle_bytes() <= 2 * kHugePage);
  all[3].Take(&slots, 3, kBytes);
  CHECK(all[3].slot.data() == was && slots.idle_bytes() == 0);
  // One that has its slot, and wants another as large.
  all[3].Take(&slots, 3, all[3].slot.bytes());
  CHECK(all[3].slot.data() != was && !slots.BehindOthers(all[3].slot.bytes()));
  for (const Owner& one : all) one.CheckMarks();
}

void OwnersGrowAtOnce() {
  EqualSlots slots(kOwners, true, "a test");
  std::vector<Owner> all(kOwners);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 50; ++round) {
        for (int o = t; o < kOwners; o += 4) {
          Owner* const owner = &all[static_cast<size_t>(o)];
          if (round % 40 == 39) owner->slot = {};
          Grow(&slots, o, owner);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Owner& one : all) one.CheckMarks();
}

}  // namespace
}  // namespace kvtable

int main() {
  kvtable::OwnersHaveMemoryOfTheirOwn();
  kvtable::OwnersThatAreNotAlike();
  kvtable::OwnersGrowAtOnce();
  return 0;
}
