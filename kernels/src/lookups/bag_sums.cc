#include "lookups/bag_sums.h"

#include <algorithm>
#include <cstring>

#include "memory/copy_rows.h"
#include "training/sum_rows.h"

namespace kvtable {
namespace {

constexpr int64_t kRowsAhead = 64;  // rows asked for before those of the bag that is added up

}  // namespace

BagSums::BagSums(const Bags& bags, ValueType rows, Combiner combiner, int64_t dim, int64_t first,
                 int64_t last, void* pooled)
    : bags_(bags),
      rows_(rows),
      combiner_(combiner),
      dim_(dim),
      last_(last),
      pooled_(static_cast<char*>(pooled)),
      add_(BestAddRows(rows, bags.weights() != nullptr)),
      bag_(first),
      id_(bags.begin(first)),
      sum_(static_cast<size_t>(dim)) {}

void BagSums::Add(const char* const* rows, int64_t n) {
  VisitValueType(bags_.value_type(), [&](auto t) { AddTyped<decltype(t)>(rows, n); });
}

void BagSums::Finish() { Add(nullptr, 0); }

template <class T>
void BagSums::AddTyped(const char* const* rows, int64_t n) {
  using Compute = ComputeOf<T>;
  const Compute* const weights = static_cast<const Compute*>(bags_.weights());
  Compute* const sum = reinterpret_cast<Compute*>(sum_.data());
  const int64_t end = id_ + n;
  const char* const* const rows_end = rows + n;
  const char* const* asked_for = rows;
  for (; bag_ < last_; ++bag_) {
    const int64_t begin = bags_.begin(bag_);
    const int64_t stop = std::min(end, bags_.end(bag_));
    const int64_t count = stop - id_;
    const bool complete = stop == bags_.end(bag_);
    if (count == 0 && !complete) return;
    const char* const* const ahead = rows + std::min(count + kRowsAhead, rows_end - rows);
    for (; asked_for < ahead; ++asked_for) {
      PrefetchRow<kAnyBytes>(*asked_for, dim_ * SizeOf(rows_));
    }
    T* const out = reinterpret_cast<T*>(pooled_) + bag_ * dim_;
    if (weights == nullptr && stop == begin + 1 && complete &&
        rows_ == bags_.value_type()) {  // whatever the combiner
      std::memcpy(out, *rows, static_cast<size_t>(dim_) * sizeof(T));
    } else {
      add_(rows, weights == nullptr ? nullptr : weights + id_, count, dim_, id_ == begin, sum);
      if (complete) StoreQuotient(sum, bags_.Divisor<Compute>(bag_, combiner_), dim_, out);
    }
    rows += count;
    id_ = stop;
    if (!complete) return;
  }
}

}  // namespace kvtable
