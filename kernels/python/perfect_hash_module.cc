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
#include <vector>

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace kvtable {
namespace {

constexpr uint64_t kMix = 0xbf58476d1ce4e5b9;
// Where a bucket has tried so many pilots, another seed is needed.
constexpr uint32_t kMostPilots = 1u << 22;
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

bool Build(Keys keys, uint64_t seed, uint64_t slots, Pilots pilots, nb::object progress) {
  const size_t count = keys.shape(0);
  const Function function = Checked(seed, slots, pilots.shape(0));
  if (slots < count) throw nb::value_error("got fewer slots than keys");
  const int64_t* const given = keys.data();
  int64_t* const chosen = pilots.data();
  nb::gil_scoped_release release;
  const Buckets grouped = Group(given, count, function);
  Bits taken(slots);
  size_t done = 0, told = 0;
  for (const uint32_t bucket : BySize(grouped.starts)) {
    const uint64_t* const hashes = grouped.hashes.data() + grouped.starts[bucket];
    const size_t size = grouped.starts[bucket + 1] - grouped.starts[bucket];
    if (size > 1) {
      std::vector<uint64_t> sorted(hashes, hashes + size);
      std::sort(sorted.begin(), sorted.end());
      if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) return false;
    }
    uint32_t number = 0;
    while (!Take(hashes, size, Pilot(number), function, &taken)) {
      if (++number == kMostPilots) return false;
    }
    chosen[bucket] = static_cast<int64_t>(Pilot(number));
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

}  // namespace
}  // namespace kvtable

NB_MODULE(_perfect_hash, module) {
  module.def(
      "build", &kvtable::Build, "keys"_a, "seed"_a, "slots"_a, "pilots"_a, "progress"_a,
      "Find the pilot of each bucket, int64 [buckets]; False if under this seed keys cannot be kept apart.");
  module.def("slots_of", &kvtable::SlotsOf, "keys"_a, "seed"_a, "slots"_a, "pilots"_a, "out"_a,
             "The slot of each key, int64 [n].");
  module.attr("MIX") = kvtable::kMix;
}
