// Admission: which of the keys that lookups miss get a row.
//
// A table with an admission policy has an Admitter beside it, which counts the keys that wait. Training lookups
// give it along (Insertion::admitter) and insert what it admits; writes of optimizers then leave out keys
// without a row (Stamp::existing_only). Counting costs nothing for keys that are there.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kvtable/types.h"

namespace kvtable {

struct AdmissionPolicy {
  enum class Kind : uint8_t {
    kAll,          // no policy
    kCount,        // with its threshold-th lookup, counted key by key
    kBloom,        // the same, counted in a counting Bloom filter
    kProbability,  // drawn for each lookup
  };
  Kind kind = Kind::kAll;
  uint32_t threshold = 1;             // kCount, kBloom
  int64_t capacity = 0;               // kBloom: keys that it is made for
  double error = 0.01;                // kBloom: the probability that a count is too high, with so many keys
  double probability = 1.0;           // kProbability
  Missing below = Missing::kInitial;  // what lookups give for a key that is not admitted: kInitial or kZeros
  bool on_update = false;             // updates count, and not lookups

  bool admits_all() const { return kind == Kind::kAll; }
  // Of kBloom.
  int64_t cells() const;
  int hashes() const;
  int64_t cell_bytes() const { return threshold <= UINT8_MAX ? 1 : 2; }
};

// Throws Error(kInvalidArgument) on numbers out of range.
void CheckAdmission(const AdmissionPolicy& policy);

// Keys (widened) that wait, and how often they came. Everything may be called from any number of threads.
class Admitter {
 public:
  static constexpr uint32_t kLeftOut = UINT32_MAX;
  static constexpr uint32_t kMostCount = UINT32_MAX - 2;  // where a count stays

  // Tells which keys have a row.
  using AreThere = std::function<void(const uint64_t* keys, int64_t n, bool* there)>;

  // Null for a policy that admits all, or by probability alone.
  static std::shared_ptr<Admitter> Create(const AdmissionPolicy& policy);
  virtual ~Admitter() = default;

  const AdmissionPolicy& policy() const { return policy_; }

  // Counts the occurrences of keys[0, n), which a lookup has missed, each up to the threshold, and says what
  // becomes of them: kLeftOut, or first[i] is the frequency that key i's row starts from, if it is i that makes
  // it (the first occurrence does). All occurrences of a key fare alike. `began` is the epoch() before the
  // lookup read: keys that have got their rows since are looked for again. When the keys have their rows, they
  // must be given to Settle.
  virtual void Admit(const uint64_t* keys, int64_t n, uint64_t began, const AreThere& are_there,
                     uint32_t* first) = 0;
  virtual void Settle(const uint64_t* keys, const uint32_t* first, int64_t n) = 0;
  // For lookups that cannot tell which keys others insert meanwhile.
  std::mutex& lookup_mutex() { return lookup_mutex_; }
  uint64_t epoch() const { return epoch_.load(std::memory_order_acquire); }

  // How often each key came; 0 for keys that do not wait.
  virtual void Counts(const uint64_t* keys, int64_t n, uint32_t* counts) const = 0;
  // Adds to the counts of keys without a row.
  virtual void Increase(const uint64_t* keys, int64_t n, const uint32_t* by) = 0;
  // Keys that got a row otherwise, or are to begin anew. A filter forgets nothing.
  virtual void Forget(const uint64_t* keys, int64_t n) = 0;
  virtual void Clear() = 0;

  // Keys that wait, and the sum of their counts; a filter does not know either: 0.
  virtual int64_t waiting() const { return 0; }
  virtual uint64_t total_count() const { return 0; }
  virtual int64_t bytes() const = 0;
  // Whether a filter has more keys in it than it was made for, so that its error is larger.
  virtual bool is_overfull() const { return false; }

  // ---- To be saved, and restored into any number of parts

  virtual void Waiting(std::vector<uint64_t>* /*keys*/, std::vector<uint32_t>* /*counts*/) const {}
  virtual std::vector<char> Filter() const { return {}; }
  // Takes for each cell the larger number, so that no count becomes too low. `bytes` is cells() cells, of one
  // byte or two.
  virtual void MergeFilter(const char* /*cells*/, int64_t /*bytes*/) {}

 protected:
  explicit Admitter(const AdmissionPolicy& policy) : policy_(policy) {}

  const AdmissionPolicy policy_;
  std::mutex lookup_mutex_;
  std::atomic<uint64_t> epoch_{0};  // rises whenever keys have got their rows
};

// What one lookup admits: settled when it ends.
class AdmittedKeys {
 public:
  // Before the lookup reads.
  explicit AdmittedKeys(Admitter* admitter) : admitter_(admitter), began_(admitter->epoch()) {}
  AdmittedKeys(const AdmittedKeys&) = delete;
  AdmittedKeys& operator=(const AdmittedKeys&) = delete;
  ~AdmittedKeys() {
    if (!keys_.empty()) admitter_->Settle(keys_.data(), first_.data(), static_cast<int64_t>(keys_.size()));
  }

  // See Admitter::Admit. Returns `first`, which holds as long as this does.
  const uint32_t* Admit(std::vector<uint64_t> missed, const Admitter::AreThere& are_there) {
    std::vector<uint32_t> first(missed.size());
    admitter_->Admit(missed.data(), static_cast<int64_t>(missed.size()), began_, are_there, first.data());
    keys_ = std::move(missed);
    first_ = std::move(first);
    return first_.data();
  }

 private:
  Admitter* const admitter_;
  const uint64_t began_;
  std::vector<uint64_t> keys_;
  std::vector<uint32_t> first_;
};

}  // namespace kvtable
