// What is noted of every lookup, at a cost beside which a lookup of one key is still seen: counters, request ids, and
// a sample of the keys. Each is for one thread at a time, which the GIL sees to.
#pragma once

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace kvtable {

// Counters and a histogram of answers of one kind, all of which were given.
class Tally {
 public:
  // `buckets` has one more than there are bounds: what is above all of them.
  struct Counts {
    int64_t answers = 0;
    std::vector<int64_t> buckets;
    double seconds = 0;
    int64_t bytes_in = 0;
    int64_t bytes_out = 0;
    int64_t keys = 0;
    int64_t missing = 0;
    std::vector<int64_t> other_buckets;  // where there are other bounds
    int64_t last = 0;  // when the last answer was given, in ms since 1970; where there are such
  };

  // Bucket i has what takes at most bounds[i], ascending, in seconds.
  explicit Tally(std::vector<double> bounds, std::vector<double> other_bounds = {})
      : bounds_(std::move(bounds)), other_bounds_(std::move(other_bounds)) {
    counts_.buckets.assign(bounds_.size() + 1, 0);
    if (!other_bounds_.empty()) counts_.other_buckets.assign(other_bounds_.size() + 1, 0);
  }

  void Add(double seconds, int64_t bytes_in, int64_t bytes_out, int64_t keys, int64_t missing) {
    ++counts_.answers;
    Count(bounds_, seconds, &counts_.buckets);
    if (!other_bounds_.empty()) {
      Count(other_bounds_, seconds, &counts_.other_buckets);
      const auto now = std::chrono::system_clock::now().time_since_epoch();
      counts_.last = std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
    }
    counts_.seconds += seconds;
    counts_.bytes_in += bytes_in;
    counts_.bytes_out += bytes_out;
    AddKeys(keys, missing);
  }

  // Of an answer that another tally has.
  void AddKeys(int64_t keys, int64_t missing) {
    counts_.keys += keys;
    counts_.missing += missing;
  }

  const Counts& counts() const { return counts_; }

 private:
  static void Count(const std::vector<double>& bounds, double seconds, std::vector<int64_t>* buckets) {
    const auto bound = std::lower_bound(bounds.begin(), bounds.end(), seconds);
    ++(*buckets)[static_cast<size_t>(bound - bounds.begin())];
  }

  std::vector<double> bounds_, other_bounds_;
  Counts counts_;
};

// Ids that no other process makes: a prefix, and a number in hexadecimal digits.
class RequestIds {
 public:
  // `prefix` is of this process alone.
  explicit RequestIds(std::string prefix) { Begin(std::move(prefix)); }

  void Begin(std::string prefix) {
    prefix_ = std::move(prefix) + "-";
    number_ = 0;
  }

  void AppendNext(std::string* text) {
    char digits[16];
    const char* const end = std::to_chars(digits, digits + sizeof(digits), ++number_, 16).ptr;
    text->append(prefix_).append(digits, static_cast<size_t>(end - digits));
  }

 private:
  std::string prefix_;
  uint64_t number_ = 0;
};

// The last keys that were noted, up to `size` of them.
class RecentKeys {
 public:
  explicit RecentKeys(int64_t size) : keys_(static_cast<size_t>(size)) {}

  // Tells, of each request, whether it is one whose keys are to be noted.
  bool Due() { return ++requests_ % kOneIn == 0; }

  // Notes up to 64 of `keys` (n), from all over them.
  void Note(const int64_t* keys, int64_t n) {
    const int64_t step = std::max<int64_t>(1, n / kOfARequest);
    for (int64_t i = 0, left = kOfARequest; i < n && left > 0; i += step, --left) {
      keys_[static_cast<size_t>(written_++) % keys_.size()] = keys[i];
    }
  }

  std::vector<int64_t> keys() const {
    const size_t there = std::min(static_cast<size_t>(written_), keys_.size());
    return {keys_.begin(), keys_.begin() + static_cast<std::ptrdiff_t>(there)};
  }

 private:
  static constexpr int64_t kOfARequest = 64;
  static constexpr int64_t kOneIn = 16;
  std::vector<int64_t> keys_;
  int64_t written_ = 0;
  int64_t requests_ = 0;
};

}  // namespace kvtable
