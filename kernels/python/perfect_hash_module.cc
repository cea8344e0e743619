// kvtools._perfect_hash: a function from keys to slots under which no two of a given set of keys meet, made of
// operations that TensorFlow has: kvtools/perfect_hash.py says how it is asked.
//
// Keys are hashed into buckets of three on average. A bucket has a pilot, a number that the hashes of its keys are
// multiplied by so that all of them fall into slots that are free; the largest buckets choose first, while most are.
// Giulio Ermanno Pibiri and Roberto Trani, PTHash: Revisiting FCH Minimal Perfect Hashing, SIGIR 2021,
// https://arxiv.org/abs/2104.10402
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace kvtable {
namespace {

constexpr uint64_t kMix = 0xbf58476d1ce4e5b9;
// Where a bucket has tried so many pilots, another seed is needed.
constexpr uint32_t kMostPilots = 1u << 22;
// Those that are tried for most buckets are computed once.
constexpr uint32_t kFirstPilots = 1024;
constexpr size_t kToldEvery = size_t{1} << 20;

// Odd, so that two keys whose hashes differ are kept apart by most pilots.
uint64_t Pilot(uint64_t number) {
  number = (number + 1) * 0x9e3779b97f4a7c15;
  number = (number ^ (number >> 30)) * 0x94d049bb133111eb;
  return (number ^ (number >> 27)) | 1;
}

uint64_t High(uint64_t number) { return number >> 32; }

// The arithmetic by which keys get slots.
struct Function {
  uint64_t seed;
  uint64_t slots;
  uint64_t buckets;

  uint64_t Hash(int64_t key) const {
    const uint64_t hash = static_cast<uint64_t>(key) * seed;
    return (hash + High(hash)) * kMix;
  }
  uint64_t Bucket(uint64_t hash) const { return High(High(hash) * buckets); }
  uint64_t Slot(uint64_t hash, uint64_t pilot) const { return High(High(hash * pilot) * slots); }
};

using Keys = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Pilots = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Slots = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Function Checked(uint64_t seed, uint64_t slots, size_t buckets) {
  if (buckets == 0 || buckets > INT32_MAX || slots > INT32_MAX) {
    throw nb::value_error("got a number of slots or buckets that makes no table");
  }
  return Function{seed, slots, buckets};
}

// The hashes of keys, those of one bucket side by side; bucket b has those from starts[b] up to starts[b + 1].
struct Buckets {
  std::vector<uint64_t> hashes;
  std::vector<uint32_t> starts;
};

Buckets Group(const int64_t* keys, size_t count, const Function& function) {
  Buckets grouped{std::vector<uint64_t>(count), std::vector<uint32_t>(function.buckets + 2)};
  auto& starts = grouped.starts;
  for (size_t i = 0; i < count; ++i) ++starts[function.Bucket(function.Hash(keys[i])) + 2];
  for (size_t bucket = 2; bucket < starts.size(); ++bucket) starts[bucket] += starts[bucket - 1];
  for (size_t i = 0; i < count; ++i) {
    const uint64_t hash = function.Hash(keys[i]);
    grouped.hashes[starts[function.Bucket(hash) + 1]++] = hash;
  }
  starts.pop_back();
  return grouped;
}

// The buckets, the largest first; before all others the one of hash 0, which has slot 0 under every pilot.
std::vector<uint32_t> BySize(const std::vector<uint32_t>& starts) {
  const size_t buckets = starts.size() - 1;
  uint32_t largest = 0;
  for (size_t bucket = 0; bucket < buckets; ++bucket)
    largest = std::max(largest, starts[bucket + 1] - starts[bucket]);
  std::vector<uint32_t> place(largest + 2);
  for (size_t bucket = 0; bucket < buckets; ++bucket)
    ++place[largest - (starts[bucket + 1] - starts[bucket]) + 1];
  for (size_t size = 1; size < place.size(); ++size) place[size] += place[size - 1];
  std::vector<uint32_t> order(buckets);
  for (size_t bucket = 0; bucket < buckets; ++bucket) {
    order[place[largest - (starts[bucket + 1] - starts[bucket])]++] = static_cast<uint32_t>(bucket);
  }
  const auto first = std::find(order.begin(), order.end(), 0u);
  std::rotate(order.begin(), first, first + 1);
  return order;
}

class Bits {
 public:
  explicit Bits(size_t count) : words_((count + 63) / 64) {}
  bool Has(uint64_t at) const { return words_[at / 64] >> (at % 64) & 1; }
  void Flip(uint64_t at) { words_[at / 64] ^= uint64_t{1} << (at % 64); }

 private:
  std::vector<uint64_t> words_;
};

// Marks the slots of a bucket's hashes under a pilot, if all are free and differ.
bool Take(const uint64_t* hashes, size_t count, uint64_t pilot, const Function& function, Bits* taken) {
  for (size_t i = 0; i < count; ++i) {
    const uint64_t slot = function.Slot(hashes[i], pilot);
    if (taken->Has(slot)) {
      while (i-- > 0) taken->Flip(function.Slot(hashes[i], pilot));
      return false;
    }
    taken->Flip(slot);
  }
  return true;
}

// Whether two of a bucket's hashes are the same.
bool HasEqual(const uint64_t* hashes, size_t count) {
  if (count > 16) {
    std::vector<uint64_t> sorted(hashes, hashes + count);
    std::sort(sorted.begin(), sorted.end());
    return std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end();
  }
  for (size_t i = 1; i < count; ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (hashes[i] == hashes[j]) return true;
    }
  }
  return false;
}

bool Build(Keys keys, uint64_t seed, uint64_t slots, Pilots pilots, nb::object progress) {
  const size_t count = keys.shape(0);
  const Function function = Checked(seed, slots, pilots.shape(0));
  if (slots < count) throw nb::value_error("got fewer slots than keys");
  const int64_t* const given = keys.data();
  int64_t* const chosen = pilots.data();
  nb::gil_scoped_release release;
  const Buckets grouped = Group(given, count, function);
  Bits taken(slots);
  std::vector<uint64_t> first_pilots(kFirstPilots);
  for (uint32_t number = 0; number < kFirstPilots; ++number) first_pilots[number] = Pilot(number);
  size_t done = 0, told = 0;
  for (const uint32_t bucket : BySize(grouped.starts)) {
    const uint64_t* const hashes = grouped.hashes.data() + grouped.starts[bucket];
    const size_t size = grouped.starts[bucket + 1] - grouped.starts[bucket];
    if (HasEqual(hashes, size)) return false;
    uint32_t number = 0;
    const auto pilot = [&] { return number < kFirstPilots ? first_pilots[number] : Pilot(number); };
    while (!Take(hashes, size, pilot(), function, &taken)) {
      if (++number == kMostPilots) return false;
    }
    chosen[bucket] = static_cast<int64_t>(pilot());
    done += size;
    if (done - told >= kToldEvery) {
      told = done;
      nb::gil_scoped_acquire acquire;
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      progress(done);
    }
  }
  return true;
}

void SlotsOf(Keys keys, uint64_t seed, uint64_t slots,
             nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig> pilots, Slots out) {
  const size_t count = keys.shape(0);
  const Function function = Checked(seed, slots, pilots.shape(0));
  if (out.shape(0) != count) throw nb::value_error("slots_of: got arrays whose lengths do not go together");
  const int64_t* const given = keys.data();
  const int64_t* const chosen = pilots.data();
  int64_t* const to = out.data();
  nb::gil_scoped_release release;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t hash = function.Hash(given[i]);
    to[i] = static_cast<int64_t>(function.Slot(hash, static_cast<uint64_t>(chosen[function.Bucket(hash)])));
  }
}

// ---- Rows, as bytes, to where their slots are

using Rows = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using RowsOut = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Places = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr size_t kAhead = 16;

void Scatter(Rows rows, Places places, int64_t first, RowsOut to) {
  const size_t count = places.shape(0), width = rows.shape(1);
  const auto room = static_cast<uint64_t>(to.shape(0));
  if (rows.shape(0) != count || to.shape(1) != width) {
    throw nb::value_error("scatter: got arrays whose shapes do not go together");
  }
  const uint8_t* const from = rows.data();
  const int64_t* const at = places.data();
  uint8_t* const out = to.data();
  nb::gil_scoped_release release;
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      const uint64_t ahead = static_cast<uint64_t>(at[i + kAhead] - first);
      if (ahead < room) __builtin_prefetch(out + ahead * width, 1);
    }
    const uint64_t place = static_cast<uint64_t>(at[i] - first);
    if (place < room) std::memcpy(out + place * width, from + i * width, width);
  }
}

bool LieIn(Places keys, Places slots, Places in_slots) {
  const size_t count = keys.shape(0);
  if (slots.shape(0) != count) throw nb::value_error("lie_in: got arrays whose lengths do not go together");
  const int64_t* const given = keys.data();
  const int64_t* const at = slots.data();
  const int64_t* const there = in_slots.data();
  const auto room = static_cast<uint64_t>(in_slots.shape(0));
  nb::gil_scoped_release release;
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count && static_cast<uint64_t>(at[i + kAhead]) < room)
      __builtin_prefetch(there + at[i + kAhead]);
    if (static_cast<uint64_t>(at[i]) >= room || there[at[i]] != given[i]) return false;
  }
  return true;
}

void Partition(Rows rows, Places places, int64_t first, int64_t group, RowsOut rows_out, Slots places_out,
               Slots counts) {
  const size_t count = places.shape(0), width = rows.shape(1), groups = counts.shape(0);
  if (rows.shape(0) != count || rows_out.shape(0) < count || rows_out.shape(1) != width ||
      places_out.shape(0) < count || group < 1) {
    throw nb::value_error("partition: got arrays whose shapes do not go together");
  }
  const uint8_t* const from = rows.data();
  const int64_t* const at = places.data();
  uint8_t* const to = rows_out.data();
  int64_t* const places_to = places_out.data();
  int64_t* const counted = counts.data();
  {
    nb::gil_scoped_release release;
    std::vector<uint32_t> of(count);
    std::fill_n(counted, groups, 0);
    bool inside = true;
    for (size_t i = 0; i < count; ++i) {
      const int64_t number = at[i] < first ? -1 : (at[i] - first) / group;
      inside &= number < static_cast<int64_t>(groups);
      of[i] = static_cast<uint32_t>(number);
      if (inside && number >= 0) ++counted[number];
    }
    if (inside) {
      std::vector<size_t> next(groups);
      for (size_t number = 1; number < groups; ++number) {
        next[number] = next[number - 1] + static_cast<size_t>(counted[number - 1]);
      }
      for (size_t i = 0; i < count; ++i) {
        if (of[i] == UINT32_MAX) continue;
        const size_t place = next[of[i]]++;
        std::memcpy(to + place * width, from + i * width, width);
        places_to[place] = at[i];
      }
      return;
    }
  }
  throw nb::value_error("partition: a place is beyond the groups");
}

}  // namespace
}  // namespace kvtable

NB_MODULE(_perfect_hash, module) {
  module.def(
      "build", &kvtable::Build, "keys"_a, "seed"_a, "slots"_a, "pilots"_a, "progress"_a,
      "Find the pilot of each bucket, int64 [buckets]; False if under this seed keys cannot be kept apart.");
  module.def("slots_of", &kvtable::SlotsOf, "keys"_a, "seed"_a, "slots"_a, "pilots"_a, "out"_a,
             "The slot of each key, int64 [n].");
  module.def(
      "scatter", &kvtable::Scatter, "rows"_a, "places"_a, "first"_a, "to"_a,
      "Copy rows, uint8 [n, width], to `to` [m, width]: row i to places[i] - first, where that is in it.");
  module.def("lie_in", &kvtable::LieIn, "keys"_a, "slots"_a, "in_slots"_a,
             "Whether each key, int64 [n], is in its slot: in_slots[slots[i]] == keys[i].");
  module.def(
      "partition", &kvtable::Partition, "rows"_a, "places"_a, "first"_a, "group"_a, "rows_out"_a,
      "places_out"_a, "counts"_a,
      "Copy the rows whose places are `first` or more, and their places, those of a group of `group` places "
      "side by side and in their order; counts, int64 [groups], gets how many each group has.");
  module.attr("MIX") = kvtable::kMix;
}
