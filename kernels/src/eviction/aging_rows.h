// Which rows of a bounded table expire first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "kvtable/table.h"

namespace kvtable {

// A list of the rows that were written longest ago, by version and position (shard << 32 | row).
//
// It does not hold all rows. A scan fills it with an eighth of them; when it runs dry, and rows that are not on it may
// have expired, the next scan comes. Rows are written with later versions than any that was there at a scan, so none
// but imported ones join it, and a scan of n rows is paid for by n / 8 rows that went or were written.
//
// Memory per row: up to 4 bytes, once something was evicted.
//
// Not thread-safe.
class AgingRows {
 public:
  // Takes the row with the lowest version below `before`, of about `rows`, from the list: its position, or kNoPosition.
  // scan(visit) calls visit(position, version) for all rows; is_there(position, version) says whether a row is still
  // as it was. `now` is the version of rows written at this moment.
  template <class Scan, class IsThere>
  uint64_t Next(uint32_t before, uint32_t now, int64_t rows, const Scan& scan, const IsThere& is_there) {
    for (;;) {
      while (!heap_.empty() && heap_.front().version < before) {
        std::pop_heap(heap_.begin(), heap_.end(), Later);
        const Row row = heap_.back();
        heap_.pop_back();
        if (is_there(row.position, row.version)) return row.position;
      }
      if (!heap_.empty() || !(end_ < Row{before, 0})) return kNoPosition;
      Fill(now, std::max(kLeastFill, static_cast<size_t>(rows) / 8), scan);
    }
  }

  // A row has come, or was written, with a version that may be any.
  void Imported(uint64_t position, uint32_t version) {
    if (!(Row{version, position} < end_)) return;
    if (heap_.size() >= most_rows_) return Clear();  // mostly entries that stand for nothing any more
    heap_.push_back({version, position});
    std::push_heap(heap_.begin(), heap_.end(), Later);
  }

  void Clear() {
    std::vector<Row>().swap(heap_);
    end_ = {};
  }
  int64_t bytes() const { return static_cast<int64_t>(heap_.capacity() * sizeof(Row)); }

 private:
  static constexpr size_t kLeastFill = 1024;
  struct Row {
    uint32_t version = 0;
    uint64_t position = 0;

    friend bool operator<(const Row& a, const Row& b) {
      return std::tie(a.version, a.position) < std::tie(b.version, b.position);
    }
  };
  // For the standard heap, which has the largest on top.
  static bool Later(const Row& a, const Row& b) { return b < a; }

  template <class Scan>
  void Fill(uint32_t now, size_t wanted, const Scan& scan) {
    heap_.clear();
    end_ = {now, 0};  // more may come that are written at this moment
    const auto keep_first = [&] {
      const auto last = heap_.begin() + static_cast<ptrdiff_t>(wanted);
      std::nth_element(heap_.begin(), last, heap_.end());
      end_ = *last;
      heap_.resize(wanted);
    };
    scan([&](uint64_t position, uint32_t version) {
      const Row row{version, position};
      if (!(row < end_)) return;
      heap_.push_back(row);
      if (heap_.size() == 2 * wanted) keep_first();
    });
    if (heap_.size() > wanted) keep_first();
    std::make_heap(heap_.begin(), heap_.end(), Later);
    most_rows_ = 2 * wanted;
  }

  std::vector<Row> heap_;  // the one with the lowest version on top
  Row end_;                // every row before it is in the heap
  size_t most_rows_ = 0;
};

}  // namespace kvtable
