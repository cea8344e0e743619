// kvtools._perfect_hash: a function from keys to slots under which no two of a given set of keys meet, made of
// operations that TensorFlow has: kvtools/perfect_hash.py says how it is asked.
//
// Keys are hashed into buckets of four on average. A bucket has a pilot, a number that is mixed into the hashes of its keys
// so that all of them fall into slots that are free; the largest buckets choose first, while most slots are.
// Giulio Ermanno Pibiri and Roberto Trani, PTHash: Revisiting FCH Minimal Perfect Hashing, SIGIR 2021,
// https://arxiv.org/abs/2104.10402
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace kvtable {
namespace {

constexpr uint64_t kMix[3] = {0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9, 0x94d049bb133111eb};
constexpr uint64_t kPilot = 0xd6e8feb86659fd93;
constexpr uint64_t kSlot = 0xff51afd7ed558ccd;
// Where a bucket has tried so many, keys have equal hashes: another seed is needed.
constexpr uint32_t kMostPilots = 1u << 26;
constexpr size_t kToldEvery = size_t{1} << 20;

// Signed shifts: TensorFlow has no unsigned ones for int64.
uint64_t Shifted(uint64_t number, int by) {
  return static_cast<uint64_t>(static_cast<int64_t>(number) >> by);
}

uint64_t Hash(int64_t key, uint64_t seed) {
  uint64_t hash = static_cast<uint64_t>(key) * kMix[0] + seed;
  hash = (hash ^ Shifted(hash, 32)) * kMix[1];
  return (hash ^ Shifted(hash, 29)) * kMix[2];
}

uint64_t Scaled(uint64_t number, uint64_t range) { return (number >> 32) * range >> 32; }

uint64_t Slot(uint64_t hash, uint32_t pilot, uint64_t slots) {
  return Scaled((hash ^ (pilot * kPilot)) * kSlot, slots);
}

using Keys = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Pilots = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Slots = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The hashes of keys, those of one bucket side by side; bucket b has those from starts[b] up to starts[b + 1].
struct Buckets {
  std::vector<uint64_t> hashes;
  std::vector<uint32_t> starts;
};

Buckets Group(const int64_t* keys, size_t count, size_t buckets, uint64_t seed) {
  Buckets grouped{std::vector<uint64_t>(count), std::vector<uint32_t>(buckets + 2)};
  auto& starts = grouped.starts;
  for (size_t i = 0; i < count; ++i) ++starts[Scaled(Hash(keys[i], seed), buckets) + 2];
  for (size_t bucket = 2; bucket < starts.size(); ++bucket) starts[bucket] += starts[bucket - 1];
  for (size_t i = 0; i < count; ++i) {
    const uint64_t hash = Hash(keys[i], seed);
    grouped.hashes[starts[Scaled(hash, buckets) + 1]++] = hash;
  }
  starts.pop_back();
  return grouped;
}

// The buckets, the largest first.
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
bool Take(const uint64_t* hashes, size_t count, uint32_t pilot, uint64_t slots, Bits* taken) {
  for (size_t i = 0; i < count; ++i) {
    const uint64_t slot = Slot(hashes[i], pilot, slots);
    if (taken->Has(slot)) {
      while (i-- > 0) taken->Flip(Slot(hashes[i], pilot, slots));
      return false;
    }
    taken->Flip(slot);
  }
  return true;
}

bool Build(Keys keys, uint64_t seed, uint64_t slots, Pilots pilots, nb::object progress) {
  const size_t count = keys.shape(0), buckets = pilots.shape(0);
  if (buckets == 0 || buckets > INT32_MAX || slots < count || slots > INT32_MAX) {
    throw nb::value_error("build: got a number of keys, buckets or slots that make no table");
  }
  const int64_t* const given = keys.data();
  int32_t* const chosen = pilots.data();
  nb::gil_scoped_release release;
  const Buckets grouped = Group(given, count, buckets, seed);
  Bits taken(slots);
  size_t done = 0, told = 0;
  for (const uint32_t bucket : BySize(grouped.starts)) {
    const uint64_t* const hashes = grouped.hashes.data() + grouped.starts[bucket];
    const size_t size = grouped.starts[bucket + 1] - grouped.starts[bucket];
    uint32_t pilot = 0;
    if (size > 1) {
      std::vector<uint64_t> sorted(hashes, hashes + size);
      std::sort(sorted.begin(), sorted.end());
      if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) return false;
    }
    while (!Take(hashes, size, pilot, slots, &taken)) {
      if (++pilot == kMostPilots) return false;
    }
    chosen[bucket] = static_cast<int32_t>(pilot);
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
             nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig> pilots, Slots out) {
  const size_t count = keys.shape(0), buckets = pilots.shape(0);
  if (out.shape(0) != count || (buckets == 0 && count != 0)) {
    throw nb::value_error("slots_of: got arrays whose lengths do not go together");
  }
  const int64_t* const given = keys.data();
  const int32_t* const chosen = pilots.data();
  int64_t* const to = out.data();
  nb::gil_scoped_release release;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t hash = Hash(given[i], seed);
    to[i] = static_cast<int64_t>(Slot(hash, static_cast<uint32_t>(chosen[Scaled(hash, buckets)]), slots));
  }
}

}  // namespace
}  // namespace kvtable

NB_MODULE(_perfect_hash, module) {
  module.def(
      "build", &kvtable::Build, "keys"_a, "seed"_a, "slots"_a, "pilots"_a, "progress"_a,
      "Find the pilot of each bucket, int32 [buckets]; False if keys have equal hashes under this seed.");
  module.def("slots_of", &kvtable::SlotsOf, "keys"_a, "seed"_a, "slots"_a, "pilots"_a, "out"_a,
             "The slot of each key, int64 [n].");
  module.attr("MIX") = nb::make_tuple(kvtable::kMix[0], kvtable::kMix[1], kvtable::kMix[2]);
  module.attr("PILOT") = kvtable::kPilot;
  module.attr("SLOT") = kvtable::kSlot;
}
