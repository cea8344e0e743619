#include "eviction/ranked_rows.h"

#include <algorithm>
#include <array>
#include <cstddef>

namespace kvtable {
namespace {

// For the standard heap, which has the largest on top.
constexpr auto kHigher = [](const auto& a, const auto& b) { return b.rank < a.rank; };

// Sorts by one of a rank's words, equal ones as they come: a byte after the other, but for those that are the same in all.
template <class Entry>
void SortByWord(std::vector<Entry>* entries, std::vector<Entry>* spare, uint64_t Rank::* word) {
  uint64_t differ = 0;
  for (const Entry& entry : *entries) differ |= entry.rank.*word ^ (*entries)[0].rank.*word;
  for (int shift = 0; shift < 64; shift += 8) {
    if ((differ >> shift & 0xff) == 0) continue;
    std::array<size_t, 257> begins{};
    for (const Entry& entry : *entries) ++begins[(entry.rank.*word >> shift & 0xff) + 1];
    for (size_t byte = 1; byte < begins.size(); ++byte) begins[byte] += begins[byte - 1];
    for (const Entry& entry : *entries) (*spare)[begins[entry.rank.*word >> shift & 0xff]++] = entry;
    entries->swap(*spare);
  }
}

}  // namespace

void RankedRows::Grow(Shard* shard, uint32_t row) {
  while (shard->size() <= row >> kChunkBits) shard->push_back(std::make_unique<Rank[]>(kChunkRows));
}

void RankedRows::Push(const Entry& entry) {
  if (below_.size() >= most_below_) {  // mostly entries that stand for nothing any more
    ForgetList();
    return;
  }
  below_.push_back(entry);
  std::push_heap(below_.begin(), below_.end(), kHigher);
}

RankedRows::Entry RankedRows::Take() {
  if (next_ == list_.size() || (!below_.empty() && below_.front().rank < list_[next_].rank)) {
    std::pop_heap(below_.begin(), below_.end(), kHigher);
    const Entry entry = below_.back();
    below_.pop_back();
    // One of these comes next, unless the list has a lower one.
    for (size_t i = 0; i < std::min<size_t>(below_.size(), 3); ++i) Prefetch(below_[i].position);
    return entry;
  }
  if (next_ + kAhead < list_.size()) Prefetch(list_[next_ + kAhead].position);
  return list_[next_++];
}

void RankedRows::ForgetList() {
  list_.clear();
  next_ = 0;
  below_.clear();
  bound_ = {};
}

Rank RankedRows::KeepLowest(size_t count) {
  const auto last = list_.begin() + static_cast<ptrdiff_t>(count) - 1;
  std::nth_element(list_.begin(), last, list_.end(),
                   [](const Entry& a, const Entry& b) { return a.rank < b.rank; });
  list_.resize(count);
  return list_.back().rank;
}

void RankedRows::SortList(size_t wanted) {
  if (list_.empty()) return;
  std::vector<Entry> spare(list_.size());
  SortByWord(&list_, &spare, &Rank::order);
  SortByWord(&list_, &spare, &Rank::score);
  bound_ = list_.back().rank;
  most_below_ = wanted;
}

void RankedRows::Clear() {
  for (Shard& shard : shards_) Shard().swap(shard);
  std::vector<Entry>().swap(list_);
  std::vector<Entry>().swap(below_);
  ForgetList();
}

int64_t RankedRows::bytes() const {
  size_t bytes = (list_.capacity() + below_.capacity()) * sizeof(Entry);
  for (const Shard& shard : shards_) bytes += shard.size() * kChunkRows * sizeof(Rank);
  return static_cast<int64_t>(bytes);
}

}  // namespace kvtable
