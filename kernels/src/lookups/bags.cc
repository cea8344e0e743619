#include "kvtable/bags.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

namespace kvtable {
namespace {

constexpr uint32_t kLeftOut = UINT32_MAX;

[[noreturn]] void ThrowInvalid(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

void CheckSplits(const int64_t* splits, int64_t bags, int64_t n) {
  bool ordered = splits[0] == 0 && splits[bags] == n;
  for (int64_t b = 0; b < bags; ++b) ordered &= splits[b] <= splits[b + 1];
  if (!ordered) {
    ThrowInvalid("the row splits of " + std::to_string(n) + " ids run from " + std::to_string(splits[0]) +
                 " to " + std::to_string(splits[bags]) +
                 "; expected numbers that rise from 0 to the number of ids.");
  }
}

// The bag of id i, checked.
int64_t BagAt(const BagsInput& in, int64_t i) {
  const int64_t* const index = in.indices + i * in.rank;
  int64_t bag = index[0];
  bool inside = bag >= 0;
  for (int64_t d = 1; d < in.outer; ++d) {
    inside &= index[d] >= 0 && index[d] < in.shape[d];
    bag = bag * in.shape[d] + index[d];
  }
  if (!inside || bag < 0 || bag >= in.bags) {
    std::string at;
    for (int64_t d = 0; d < in.outer; ++d) at += (d == 0 ? "" : ", ") + std::to_string(index[d]);
    ThrowInvalid("id " + std::to_string(i) + " is in row [" + at + "], and there are " +
                 std::to_string(in.bags) + " rows.");
  }
  return bag;
}

// Finds the splits, zeros before, of ids that are bag after bag already, as they nearly always are. False where they are
// not.
bool SplitInOrder(const BagsInput& in, int64_t* splits) {
  const int64_t n = in.n;
  const int64_t bags = in.bags;
  int64_t last = 0;
  if (in.outer == 1) {
    // The hardware foresees nothing beyond the page that it is in, and 256 ids fill one.
    constexpr int64_t kAhead = 4096 / sizeof(int64_t);
    const int64_t* const end = in.indices + n * in.rank;
    const int64_t* index = in.indices;
    for (int64_t i = 0; i < n; ++i, index += in.rank) {
      __builtin_prefetch(std::min(index + kAhead, end));
      const int64_t bag = *index;
      if (bag < last || bag >= bags) return false;
      splits[bag + 1] = i + 1;
      last = bag;
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      const int64_t bag = BagAt(in, i);
      if (bag < last) return false;
      splits[bag + 1] = i + 1;
      last = bag;
    }
  }
  for (int64_t b = 1; b <= bags; ++b) splits[b] = std::max(splits[b], splits[b - 1]);
  return true;
}

template <class T>
bool Positive(const void* weights, int64_t i) {
  return static_cast<const T*>(weights)[i] > 0;
}

}  // namespace

Bags::Bags(const BagsInput& in) : key_type_(in.key_type), value_type_(in.value_type) {
  if (in.n < 0 || in.n >= int64_t{UINT32_MAX} || in.bags < 0 || in.bags >= int64_t{UINT32_MAX}) {
    ThrowInvalid(std::to_string(in.n) + " ids in " + std::to_string(in.bags) +
                 " rows; expected fewer than 4294967295 of each. Split the batch.");
  }
  keys_ = static_cast<const char*>(in.keys);
  weights_ = in.weights;
  if (in.splits != nullptr) CheckSplits(in.splits, in.bags, in.n);
  const bool wide = value_type_ == ValueType::kFloat64;
  const bool choosy = in.positive_only && in.weights != nullptr;
  const auto kept = [&](int64_t i) {
    return !choosy || (wide ? Positive<double>(in.weights, i) : Positive<float>(in.weights, i));
  };

  splits_.assign(static_cast<size_t>(in.bags) + 1, 0);
  if (!choosy && in.fill_key == nullptr) {
    if (in.splits != nullptr) {
      std::copy(in.splits, in.splits + in.bags + 1, splits_.begin());
      return;
    }
    if (SplitInOrder(in, splits_.data())) return;
    std::fill(splits_.begin(), splits_.end(), 0);
  }
  std::vector<uint32_t> bag_of(static_cast<size_t>(in.n));
  bool in_order = true;
  int64_t bag = 0;
  int64_t last = 0;
  for (int64_t i = 0; i < in.n; ++i) {
    if (in.splits == nullptr) {
      bag = BagAt(in, i);
    } else {
      while (i >= in.splits[bag + 1]) ++bag;
    }
    const bool keep = kept(i);
    bag_of[static_cast<size_t>(i)] = keep ? static_cast<uint32_t>(bag) : kLeftOut;
    in_order &= keep && bag >= last;
    last = bag;
    if (keep) ++splits_[static_cast<size_t>(bag) + 1];
  }
  if (in.fill_key != nullptr) {
    for (size_t b = 1; b < splits_.size(); ++b) {
      if (splits_[b] != 0) continue;
      splits_[b] = 1;
      in_order = false;
    }
  }
  for (size_t b = 1; b < splits_.size(); ++b) splits_[b] += splits_[b - 1];
  if (!in_order) Reorder(in, bag_of);
}

void Bags::Reorder(const BagsInput& in, const std::vector<uint32_t>& bag_of) {
  const size_t n = static_cast<size_t>(ids());
  sources_.assign(n, kFiller);
  std::vector<int64_t> next(splits_.begin(), splits_.end());
  for (size_t i = 0; i < bag_of.size(); ++i) {
    if (bag_of[i] == kLeftOut) continue;
    sources_[static_cast<size_t>(next[bag_of[i]]++)] = static_cast<uint32_t>(i);
  }
  const size_t key_bytes = static_cast<size_t>(SizeOf(key_type_));
  own_keys_.resize(n * key_bytes);
  for (size_t i = 0; i < n; ++i) {
    const char* const from = sources_[i] == kFiller
                                 ? static_cast<const char*>(in.fill_key)
                                 : static_cast<const char*>(in.keys) + sources_[i] * key_bytes;
    std::memcpy(own_keys_.data() + i * key_bytes, from, key_bytes);
  }
  keys_ = own_keys_.data();
  if (in.weights == nullptr) return;
  const auto copy = [&](auto one) {
    using T = decltype(one);
    own_weights_.resize(n * sizeof(T));
    T* const to = reinterpret_cast<T*>(own_weights_.data());
    for (size_t i = 0; i < n; ++i) {
      to[i] = sources_[i] == kFiller ? one : static_cast<const T*>(in.weights)[sources_[i]];
    }
  };
  value_type_ == ValueType::kFloat64 ? copy(1.0) : copy(1.0f);
  weights_ = own_weights_.data();
}

int64_t Bags::RangeBegin(int64_t r, int64_t ranges) const {
  // A bag costs its ids and one for itself, so the cost up to bag b is begin(b) + b.
  const int64_t wanted = (ids() + size()) * r / ranges;
  int64_t low = 0;
  int64_t high = size();
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (begin(middle) + middle < wanted) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return r == ranges ? size() : low;
}

template <class T>
T Bags::Divisor(int64_t bag, Combiner combiner) const {
  if (combiner == Combiner::kSum) return 1;
  T total = 0;
  if (weights_ == nullptr) {
    total = static_cast<T>(end(bag) - begin(bag));
  } else {
    const T* const weights = static_cast<const T*>(weights_);
    for (int64_t i = begin(bag); i < end(bag); ++i) {
      total += combiner == Combiner::kMean ? weights[i] : weights[i] * weights[i];
    }
  }
  return combiner == Combiner::kMean ? total : std::sqrt(total);
}
template float Bags::Divisor<float>(int64_t, Combiner) const;
template double Bags::Divisor<double>(int64_t, Combiner) const;

}  // namespace kvtable
