#include "eviction/ranked_rows.h"

#include <algorithm>
#include <cstddef>

namespace kvtable {
namespace {

// For the standard heap, which has the largest on top.
constexpr auto kHigher = [](const auto& a, const auto& b) { return b.rank < a.rank; };

}  // namespace

void RankedRows::Grow(Shard* shard, uint32_t row) {
  while (shard->size() <= row >> kChunkBits) shard->push_back(std::make_unique<Rank[]>(kChunkRows));
}

void RankedRows::Push(const Entry& entry) {
  if (heap_.size() >= most_entries_) {  // mostly entries that stand for nothing any more
    EmptyHeap();
    return;
  }
  heap_.push_back(entry);
  std::push_heap(heap_.begin(), heap_.end(), kHigher);
}

RankedRows::Entry RankedRows::Pop() {
  std::pop_heap(heap_.begin(), heap_.end(), kHigher);
  const Entry entry = heap_.back();
  heap_.pop_back();
  return entry;
}

void RankedRows::EmptyHeap() {
  heap_.clear();
  bound_ = {};
}

Rank RankedRows::KeepLowest(size_t count) {
  const auto last = heap_.begin() + static_cast<ptrdiff_t>(count) - 1;
  std::nth_element(heap_.begin(), last, heap_.end(),
                   [](const Entry& a, const Entry& b) { return a.rank < b.rank; });
  heap_.resize(count);
  return heap_.back().rank;
}

void RankedRows::Heapify(size_t wanted) {
  for (const Entry& entry : heap_) bound_ = std::max(bound_, entry.rank);
  most_entries_ = 2 * wanted;
  std::make_heap(heap_.begin(), heap_.end(), kHigher);
}

void RankedRows::Clear() {
  for (Shard& shard : shards_) Shard().swap(shard);
  std::vector<Entry>().swap(heap_);
  EmptyHeap();
}

int64_t RankedRows::bytes() const {
  size_t bytes = heap_.capacity() * sizeof(Entry);
  for (const Shard& shard : shards_) bytes += shard.size() * kChunkRows * sizeof(Rank);
  return static_cast<int64_t>(bytes);
}

}  // namespace kvtable
