#include <algorithm>
#include <cmath>
#include <mutex>
#include <string>

#include "admission/counting_filter.h"
#include "kvtable/admission.h"
#include "memory/prefetch.h"
#include "memory/scratch.h"
#include "table/shard.h"

namespace kvtable {
namespace {

constexpr int64_t kAhead = 16;  // keys asked for before the one being counted

[[noreturn]] void ThrowInvalid(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

// Keys that a lookup missed, and that have got their rows since: first[i] = 0 for them, kLeftOut for the others.
void FindSettled(const uint64_t* keys, int64_t n, const Admitter::AreThere& are_there, uint32_t* first) {
  Scratch<bool> there(static_cast<size_t>(n));
  are_there(keys, n, there.data());
  for (int64_t i = 0; i < n; ++i) first[i] = there[static_cast<size_t>(i)] ? 0 : Admitter::kLeftOut;
}

// Counts key by key, in the stamps of a shard: its index, and a row of one byte for each key.
//
// A key that is admitted stays until Settle, with kSettling for a version: lookups of other threads that miss it
// meanwhile insert it, too, and whoever is first gives its row the count.
class KeyCounts : public Admitter {
 public:
  explicit KeyCounts(const AdmissionPolicy& policy)
      : Admitter(policy),
        counts_(&seats_, 0, std::make_shared<RowLayout>(ValueType::kInt8, 1, std::vector<SlotSpec>()), true,
                std::make_shared<EqualSlots>(1, true, "the index of keys' counts"),
                std::make_shared<SharedPages>(1, true, "counts of keys")) {}

  void Admit(const uint64_t* keys, int64_t n, uint64_t began, const AreThere& are_there,
             uint32_t* first) override {
    std::lock_guard<std::mutex> hold(mutex_);
    const bool look_again = began != epoch();
    if (look_again) FindSettled(keys, n, are_there, first);
    // Rows of keys that wait, found once: an occurrence is looked at twice.
    Scratch<uint32_t> rows(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) PrefetchToWrite(counts_.index.Home(Mix64(keys[i + kAhead])).bucket());
      rows[static_cast<size_t>(i)] = BucketIndex::kNoRow;
      if (look_again && first[i] == 0) continue;
      bool is_new = false;
      const uint32_t row = counts_.FindOrInsert(keys[i], Mix64(keys[i]), &is_new);
      RowStamp& stamp = *counts_.rows.StampOf(row);
      // Not beyond the threshold: so it does not matter how a batch is cut up.
      if (stamp.version != kSettling && stamp.frequency < policy_.threshold) {
        ++stamp.frequency;
        ++total_;
      }
      rows[static_cast<size_t>(i)] = row;
    }
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t row = rows[static_cast<size_t>(i)];
      if (row == BucketIndex::kNoRow) continue;
      RowStamp& stamp = *counts_.rows.StampOf(row);
      first[i] = kLeftOut;
      if (stamp.frequency < policy_.threshold) continue;
      first[i] = stamp.frequency;
      if (stamp.version != kSettling) total_ -= stamp.frequency;
      stamp.version = kSettling;
    }
  }

  void Settle(const uint64_t* keys, const uint32_t* first, int64_t n) override {
    std::lock_guard<std::mutex> hold(mutex_);
    bool any = false;
    for (int64_t i = 0; i < n; ++i) {
      if (first[i] == kLeftOut) continue;
      const uint32_t row = counts_.index.Find(Mix64(keys[i]));
      if (row == BucketIndex::kNoRow || counts_.rows.StampOf(row)->version != kSettling) continue;
      Remove(keys[i]);
      any = true;
    }
    if (any) epoch_.fetch_add(1, std::memory_order_release);
  }

  void Counts(const uint64_t* keys, int64_t n, uint32_t* counts) const override {
    std::lock_guard<std::mutex> hold(mutex_);
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t row = counts_.index.Find(Mix64(keys[i]));
      counts[i] = row == BucketIndex::kNoRow ? 0 : counts_.rows.StampOf(row)->frequency;
    }
  }

  void Increase(const uint64_t* keys, int64_t n, const uint32_t* by) override {
    std::lock_guard<std::mutex> hold(mutex_);
    for (int64_t i = 0; i < n; ++i) {
      if (by[i] == 0) continue;
      bool is_new = false;
      const uint32_t row = counts_.FindOrInsert(keys[i], Mix64(keys[i]), &is_new);
      RowStamp& stamp = *counts_.rows.StampOf(row);
      if (stamp.version == kSettling) continue;
      const uint32_t more = std::min(by[i], kMostCount - stamp.frequency);
      stamp.frequency += more;
      total_ += more;
    }
  }

  void Forget(const uint64_t* keys, int64_t n) override {
    std::lock_guard<std::mutex> hold(mutex_);
    if (counts_.rows.live_rows() == 0) return;
    for (int64_t i = 0; i < n; ++i) Remove(keys[i]);
  }

  void Clear() override {
    std::lock_guard<std::mutex> hold(mutex_);
    counts_.Clear();
    total_ = 0;
  }

  int64_t waiting() const override {
    std::lock_guard<std::mutex> hold(mutex_);
    return counts_.rows.live_rows();
  }
  uint64_t total_count() const override {
    std::lock_guard<std::mutex> hold(mutex_);
    return total_;
  }
  int64_t bytes() const override {
    std::lock_guard<std::mutex> hold(mutex_);
    return static_cast<int64_t>(counts_.index.bytes()) + counts_.rows.TouchedRowBytes() +
           counts_.rows.TouchedColumnBytes();
  }

  void Waiting(std::vector<uint64_t>* keys, std::vector<uint32_t>* counts) const override {
    std::lock_guard<std::mutex> hold(mutex_);
    keys->reserve(counts_.rows.live_rows());
    counts->reserve(counts_.rows.live_rows());
    counts_.rows.ForEachLive(0, counts_.rows.high_water(), [&](uint32_t row) {
      const RowStamp& stamp = *counts_.rows.StampOf(row);
      if (stamp.version != kSettling) {
        keys->push_back(stamp.key);
        counts->push_back(stamp.frequency);
      }
      return true;
    });
  }

 private:
  static constexpr uint32_t kSettling = 1;

  void Remove(uint64_t key) {
    counts_.rows.PrepareFree(1);
    const uint32_t row = counts_.index.Find(Mix64(key));
    if (row == BucketIndex::kNoRow) return;
    const RowStamp& stamp = *counts_.rows.StampOf(row);
    if (stamp.version != kSettling) total_ -= stamp.frequency;
    counts_.Remove(Mix64(key));
  }

  mutable std::mutex mutex_;
  ReadSeats seats_;  // nobody takes one: `mutex_` guards the shard
  Shard counts_;     // its own lock is not used
  uint64_t total_ = 0;
};

// Counts in a filter, which takes no note of what has a row.
template <class Cell>
class FilteredCounts : public Admitter {
 public:
  explicit FilteredCounts(const AdmissionPolicy& policy)
      : Admitter(policy), filter_(policy.cells(), policy.hashes(), policy.threshold) {
    const double cells = static_cast<double>(policy.cells());
    const double entries = static_cast<double>(policy.hashes()) * static_cast<double>(policy.capacity);
    full_ = static_cast<int64_t>(1.02 * cells * (1.0 - std::exp(-entries / cells))) + 64;
  }

  void Admit(const uint64_t* keys, int64_t n, uint64_t, const AreThere&, uint32_t* first) override {
    std::lock_guard<std::mutex> hold(mutex_);
    for (int64_t i = 0; i < std::min(kAhead, n); ++i) filter_.Prefetch(keys[i]);
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) filter_.Prefetch(keys[i + kAhead]);
      filter_.Add(keys[i], 1);
    }
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) filter_.Prefetch(keys[i + kAhead]);
      first[i] = filter_.Count(keys[i]) < policy_.threshold ? kLeftOut : policy_.threshold;
    }
  }

  void Settle(const uint64_t*, const uint32_t*, int64_t) override {}

  void Counts(const uint64_t* keys, int64_t n, uint32_t* counts) const override {
    std::lock_guard<std::mutex> hold(mutex_);
    for (int64_t i = 0; i < n; ++i) counts[i] = filter_.Count(keys[i]);
  }

  void Increase(const uint64_t* keys, int64_t n, const uint32_t* by) override {
    std::lock_guard<std::mutex> hold(mutex_);
    for (int64_t i = 0; i < n; ++i) filter_.Add(keys[i], by[i]);
  }

  void Forget(const uint64_t*, int64_t) override {}

  void Clear() override {
    std::lock_guard<std::mutex> hold(mutex_);
    filter_.Clear();
  }

  int64_t bytes() const override { return policy_.cells() * policy_.cell_bytes(); }

  bool is_overfull() const override {
    std::lock_guard<std::mutex> hold(mutex_);
    return filter_.used() > full_;
  }

  std::vector<char> Filter() const override {
    std::lock_guard<std::mutex> hold(mutex_);
    const char* const begin = reinterpret_cast<const char*>(filter_.cells().data());
    return std::vector<char>(begin, begin + bytes());
  }

  void MergeFilter(const char* cells, int64_t bytes) override {
    std::lock_guard<std::mutex> hold(mutex_);
    if (bytes == policy_.cells()) {
      filter_.Merge(reinterpret_cast<const uint8_t*>(cells));
    } else if (bytes == policy_.cells() * 2) {
      filter_.Merge(reinterpret_cast<const uint16_t*>(cells));
    } else {
      ThrowInvalid("A filter of " + std::to_string(bytes) + " bytes; expected " +
                   std::to_string(policy_.cells()) + " cells of one byte or two.");
    }
  }

 private:
  mutable std::mutex mutex_;
  CountingFilter<Cell> filter_;
  int64_t full_;
};

}  // namespace

int AdmissionPolicy::hashes() const {
  return std::clamp(static_cast<int>(std::lround(-std::log2(error))), 1,
                    CountingFilter<uint8_t>::kMostHashes);
}

int64_t AdmissionPolicy::cells() const {
  // So many that a cell is empty with the probability that makes `hashes` cells all taken with `error`.
  const double taken = std::pow(error, 1.0 / hashes());
  const double cells = -static_cast<double>(hashes()) * static_cast<double>(capacity) / std::log1p(-taken);
  return (static_cast<int64_t>(std::ceil(cells)) + 63) / 64 * 64;
}

void CheckAdmission(const AdmissionPolicy& policy) {
  using Kind = AdmissionPolicy::Kind;
  if (policy.below != Missing::kInitial && policy.below != Missing::kZeros) {
    ThrowInvalid("Keys that are not admitted give their initial value, or zeros.");
  }
  if (policy.kind == Kind::kProbability && !(policy.probability >= 0.0 && policy.probability <= 1.0)) {
    ThrowInvalid("An admission probability of " + std::to_string(policy.probability) +
                 "; expected 0.0 to 1.0.");
  }
  if (policy.kind == Kind::kCount && policy.threshold > Admitter::kMostCount) {
    ThrowInvalid("An admission threshold of " + std::to_string(policy.threshold) + "; expected up to " +
                 std::to_string(Admitter::kMostCount) + ".");
  }
  if (policy.kind != Kind::kBloom) return;
  if (policy.threshold > UINT16_MAX) {
    ThrowInvalid("An admission threshold of " + std::to_string(policy.threshold) +
                 " in a filter, whose cells count to 65535: count key by key.");
  }
  if (policy.capacity < 1 || policy.capacity > int64_t{1} << 36) {
    ThrowInvalid("An admission filter for " + std::to_string(policy.capacity) + " keys; expected 1 to 2^36.");
  }
  if (!(policy.error >= 1e-9 && policy.error < 1.0)) {
    ThrowInvalid("An admission filter with an error of " + std::to_string(policy.error) +
                 "; expected a probability from 1e-9 to below 1.");
  }
}

std::shared_ptr<Admitter> Admitter::Create(const AdmissionPolicy& policy) {
  CheckAdmission(policy);
  switch (policy.kind) {
    case AdmissionPolicy::Kind::kCount:
      return std::make_shared<KeyCounts>(policy);
    case AdmissionPolicy::Kind::kBloom:
      if (policy.cell_bytes() == 1) return std::make_shared<FilteredCounts<uint8_t>>(policy);
      return std::make_shared<FilteredCounts<uint16_t>>(policy);
    default:
      return nullptr;
  }
}

}  // namespace kvtable
