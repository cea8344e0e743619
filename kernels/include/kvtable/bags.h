// The ids of a pooled lookup, bag after bag. A bag's rows are combined into one row of output.
#pragma once

#include <cstdint>
#include <vector>

#include "kvtable/types.h"

namespace kvtable {

// sum: of weight x row. mean: that over the sum of weights. sqrtn: over the root of the sum of their squares.
// Where the divisor is zero, the result is zeros.
enum class Combiner : uint8_t { kSum, kMean, kSqrtN };

// Which id is in which bag, in one of two forms: `splits`, or an index (n, rank) into an array of `shape`,
// whose first `outer` columns, taken as one number, are the bag. Such ids may come in any order.
struct BagsInput {
  KeyType key_type = KeyType::kInt64;
  ValueType value_type = ValueType::kFloat32;  // of the table; weights are double for kFloat64, else float
  const void* keys = nullptr;                  // (n)
  int64_t n = 0;
  int64_t bags = 0;

  const int64_t* splits = nullptr;  // (bags + 1): bag b has ids [splits[b], splits[b + 1])

  const int64_t* indices = nullptr;  // (n, rank)
  int64_t rank = 0;
  const int64_t* shape = nullptr;  // (outer at least)
  int64_t outer = 1;

  const void* weights = nullptr;   // (n), or null: all are 1
  bool positive_only = false;      // leaves out ids whose weight is not positive
  const void* fill_key = nullptr;  // (1), or null: the one id, of weight 1, of bags that have no other
};

// Immutable. Points into its input's arrays where they are in order already.
class Bags {
 public:
  static constexpr uint32_t kFiller = UINT32_MAX;

  // Throws Error(kInvalidArgument) on splits or indices that are out of range.
  explicit Bags(const BagsInput& input);

  KeyType key_type() const { return key_type_; }
  ValueType value_type() const { return value_type_; }
  int64_t size() const { return static_cast<int64_t>(splits_.size()) - 1; }
  int64_t ids() const { return splits_.back(); }
  int64_t begin(int64_t bag) const { return splits_[static_cast<size_t>(bag)]; }
  int64_t end(int64_t bag) const { return splits_[static_cast<size_t>(bag) + 1]; }

  const char* keys() const { return keys_; }        // (ids)
  const void* weights() const { return weights_; }  // (ids) or null: all are 1

  // The place of id i in the input, or kFiller.
  uint32_t source(int64_t i) const {
    return sources_.empty() ? static_cast<uint32_t>(i) : sources_[static_cast<size_t>(i)];
  }

  // Splits the bags into `ranges` of about equal work: the first bag of range r, or size() for r == ranges.
  int64_t RangeBegin(int64_t r, int64_t ranges) const;

  // What a bag's sum is divided by; T is float or double.
  template <class T>
  T Divisor(int64_t bag, Combiner combiner) const;

 private:
  void Reorder(const BagsInput& input, const std::vector<uint32_t>& bag_of);

  KeyType key_type_;
  ValueType value_type_;
  std::vector<int64_t> splits_;  // (bags + 1)
  const char* keys_;
  const void* weights_;
  // Where the input was not in order, or some ids were left out or added.
  std::vector<uint32_t> sources_;
  std::vector<char> own_keys_;
  std::vector<char> own_weights_;
};

}  // namespace kvtable
