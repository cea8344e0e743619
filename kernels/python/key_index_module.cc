// kvtools._key_index: which of some keys come by in a stream of many.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/hash.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace kvtable {
namespace {

using Keys = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr size_t kMostKeys = INT32_MAX;
// So many keys are looked up at once: the memory that each needs is asked for before the first one waits for it.
constexpr size_t kGroup = 32;

struct Slot {
  int64_t key;
  int32_t place;  // -1 where the slot is free
};

// Open addressing with linear probing. A place is the number of a key's first occurrence among those given.
class KeyIndex {
 public:
  explicit KeyIndex(Keys keys) {
    const size_t count = keys.shape(0);
    if (count > kMostKeys) throw nb::value_error("there are more keys than an index has places for");
    const nb::gil_scoped_release release;
    size_t slots = 16;
    while (slots < count + count / 2) slots *= 2;
    mask_ = slots - 1;
    slots_.assign(slots, Slot{0, -1});
    same_.resize(count);
    const int64_t* const key = keys.data();
    size_t hashes[kGroup];
    for (size_t begin = 0; begin < count; begin += kGroup) {
      const size_t size = std::min(kGroup, count - begin);
      Prefetch(key + begin, size, hashes);
      for (size_t i = 0; i < size; ++i) {
        Slot& slot = slots_[SlotOf(key[begin + i], hashes[i])];
        if (slot.place < 0) slot = {key[begin + i], static_cast<int32_t>(begin + i)};
        same_[begin + i] = slot.place;
      }
    }
  }

  void Find(Keys keys, int64_t first, Numbers rows) const {
    if (rows.shape(0) != same_.size()) throw nb::value_error("there must be a row for each key of the index");
    const nb::gil_scoped_release release;
    const int64_t* const key = keys.data();
    int64_t* const row = rows.data();
    const size_t count = keys.shape(0);
    size_t hashes[kGroup];
    for (size_t begin = 0; begin < count; begin += kGroup) {
      const size_t size = std::min(kGroup, count - begin);
      Prefetch(key + begin, size, hashes);
      for (size_t i = 0; i < size; ++i) {
        const int32_t place = slots_[SlotOf(key[begin + i], hashes[i])].place;
        if (place >= 0) row[place] = first + static_cast<int64_t>(begin + i);
      }
    }
  }

  void Spread(Numbers rows) const {
    if (rows.shape(0) != same_.size()) throw nb::value_error("there must be a row for each key of the index");
    int64_t* const row = rows.data();
    // The first occurrence of a key comes before the others.
    for (size_t i = 0; i < same_.size(); ++i) row[i] = row[same_[i]];
  }

 private:
  void Prefetch(const int64_t* keys, size_t count, size_t* hashes) const {
    for (size_t i = 0; i < count; ++i) {
      hashes[i] = static_cast<size_t>(Mix64(static_cast<uint64_t>(keys[i]))) & mask_;
      __builtin_prefetch(&slots_[hashes[i]]);
    }
  }

  // The slot of a key, or the free one where it would be.
  size_t SlotOf(int64_t key, size_t slot) const {
    while (slots_[slot].place >= 0 && slots_[slot].key != key) slot = (slot + 1) & mask_;
    return slot;
  }

  size_t mask_;
  std::vector<Slot> slots_;
  std::vector<int32_t> same_;  // the place of each key that was given
};

}  // namespace

NB_MODULE(_key_index, m) {
  m.doc() = "Which of some keys come by in a stream of many.";
  nb::class_<KeyIndex>(m, "KeyIndex", "Keys, int64 (n,), to be found again.")
      .def(nb::init<Keys>(), "keys"_a)
      .def("find", &KeyIndex::Find, "keys"_a, "first"_a, "rows"_a,
           R"(Note the rows of keys that come by.

Args:
    keys: keys, int64 (m,).
    first: the number of the first one's row.
    rows: int64 (n,): where a key of the index is among `keys`, the number of its row stands at its first occurrence
        afterwards; of several the last one's.
)")
      .def("spread", &KeyIndex::Spread, "rows"_a,
           "Copy `rows`, int64 (n,), from the first occurrence of each key of the index to the others.");
}

}  // namespace kvtable
