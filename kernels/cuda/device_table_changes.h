// The table in device memory: what changed since a version, and exports of one moment.
//
// The device does one operation after the other, so whatever is read within one operation is of one moment. An export reads
// so, when it begins, as many rows as half of its AsideMemory holds: of an increment that is mostly all. For
// what is left, operations that write wait until it has been read.
#pragma once

#include <condition_variable>
#include <cstring>

#include "device_table_impl.h"
#include "export_kernels.h"

namespace kvtable {

template <class Device>
class DeviceTableImpl<Device>::MomentExporter : public kvtable::Exporter {
 public:
  MomentExporter(DeviceTableImpl* table, std::shared_ptr<AsideMemory> memory)
      : table_(table), memory_(std::move(memory)), layout_(table->layout_) {}
  ~MomentExporter() override {
    LetWrite();
    for (const Rows& rows : rows_) memory_->Shrink(rows.bytes);
  }

  int64_t max_rows() const override {
    std::lock_guard<std::mutex> hold(mutex_);
    return left_;
  }

  int64_t Next(int64_t capacity, const Buffers& out, ParallelFor& threads) override {
    std::lock_guard<std::mutex> hold(mutex_);
    memory_->NoteProgress();
    while (rows_.empty()) {
      if (ended()) {
        left_ = 0;
        return 0;
      }
      const Operation operation(table_,
                                threads.stream() != nullptr ? threads.stream() : table_->options_.stream);
      CheckNotGivenUp();
      try {
        ReadInside();
      } catch (...) {  // what was read will not come again
        given_up_.store(true);
        throw;
      }
      if (ended()) LetWriteInside();
    }
    const int64_t n = Copy(std::min(capacity, rows_.front().n - next_), out);
    left_ -= n;
    memory_->NoteProgress();
    return n;
  }

  bool IsUrgent() const override { return holds_up_.load() || 2 * memory_->used() > memory_->limit(); }
  void KeepAlive() override { memory_->NoteProgress(); }
  uint64_t version() const override { return version_; }
  int64_t born_rows() const override {
    std::lock_guard<std::mutex> hold(mutex_);
    return born_;
  }
  int64_t removed_rows() const override { return static_cast<int64_t>(removed_.size()); }
  void RemovedKeys(void* keys) const override {
    for (size_t i = 0; i < removed_.size(); ++i) StoreKey(removed_[i], keys, table_->narrow_, i);
  }

  // ---- Within an operation of the table

  // Begins the moment.
  void Begin(const MomentOptions& options) {
    if (options.since) {
      changed_.emplace();
      changed_->era = table_->changes_.EraOf(*options.since);
    }
    const ExportedRows all{RowPredicate(), changed_};
    left_ = table_->ListRows(all, 0, UINT64_MAX, 0, {});
    if (options.cut || options.since) {
      version_ = table_->changes_.Cut(&table_->device_, options.since.value_or(0),
                                      options.since ? &removed_ : nullptr);
      table_->rows_.changes = table_->changes_.view();
    }
    if (!removed_.empty()) KeepAbsent();
    while (!ended() && 2 * memory_->used() < memory_->limit()) ReadInside();
    if (ended()) return;
    table_->moments_.push_back(this);
    holds_up_.store(true);
  }

  // Whether writes have to wait for it; not where nobody takes its rows.
  bool StillHoldsUp() {
    if (memory_->IsStuck()) given_up_.store(true);
    return !given_up_.load();
  }

 private:
  // Rows in host memory, columns side by side.
  struct Rows {
    int64_t n = 0;
    int64_t bytes = 0;
    std::vector<char> keys;
    std::vector<uint32_t> freqs;
    std::vector<uint32_t> versions;
    std::vector<uint64_t> scores;
    std::vector<uint64_t> orders;
    std::vector<char> contents;
  };

  static constexpr int64_t kReadBytes = int64_t{8} << 20;  // on the device at a time

  bool ended() const { return progress_.ended; }
  int64_t KeyBytes() const { return table_->narrow_ ? 4 : 8; }

  void CheckNotGivenUp() const {
    if (!given_up_.load()) return;
    throw Error(
        ErrorCode::kFailedPrecondition,
        "The export of one moment was given up: for a minute nobody took its rows while others waited to "
        "change them, or an earlier read of it failed. Save again. If that fails, too, every thread that "
        "could have taken them was waiting: have more of them (in TensorFlow, inter_op_parallelism_threads "
        "of the session, or of its server).");
  }

  // Of the removed keys those that are not there now.
  void KeepAbsent() {
    const int64_t most = kReadBytes / KeyBytes();
    std::vector<uint64_t> absent;
    std::vector<char> keys;
    for (size_t begin = 0; begin < removed_.size(); begin += static_cast<size_t>(most)) {
      const size_t n = std::min(removed_.size() - begin, static_cast<size_t>(most));
      keys.resize(n * static_cast<size_t>(KeyBytes()));
      for (size_t i = 0; i < n; ++i) StoreKey(removed_[begin + i], keys.data(), table_->narrow_, i);
      const Block there = table_->Allocate(keys.size() + n, MemoryPlace::kDevice, "an export");
      bool* const found = reinterpret_cast<bool*>(there.data() + keys.size());
      table_->device_.Copy(there.data(), keys.data(), keys.size());
      DeviceKeys batch;
      batch.keys = there.data();
      batch.n = static_cast<int64_t>(n);
      table_->Locate(batch, nullptr, nullptr, found, nullptr, nullptr);
      const std::unique_ptr<bool[]> is_there = std::make_unique<bool[]>(n);
      table_->device_.Copy(is_there.get(), found, n);
      table_->device_.WaitInside();
      for (size_t i = 0; i < n; ++i) {
        if (!is_there[i]) absent.push_back(removed_[begin + i]);
      }
    }
    removed_ = std::move(absent);
  }

  // Reads the next rows, which may be none.
  void ReadInside() {
    // Columns of so many rows, each on a multiple of 16 bytes: contents, scores, orders, keys, and the others.
    const int64_t row_bytes = layout_.row_bytes + 2 * 8 + KeyBytes() + 3 * 4;
    const int64_t bytes = std::min(kReadBytes, memory_->limit() / 8);
    const int64_t most = std::max(int64_t{64}, bytes / row_bytes / 64 * 64);
    const Block block = table_->Allocate(Count(most * row_bytes), MemoryPlace::kDevice, "an export");
    char* at = block.data();
    const auto next = [&](int64_t bytes) {
      char* const column = at;
      at += most * bytes;
      return column;
    };
    char* const contents = next(layout_.row_bytes);
    DeviceExporter::Buffers out;
    out.scores = reinterpret_cast<uint64_t*>(next(8));
    out.orders = reinterpret_cast<uint64_t*>(next(8));
    out.keys = next(KeyBytes());
    out.freqs = reinterpret_cast<uint32_t*>(next(4));
    out.versions = reinterpret_cast<uint32_t*>(next(4));
    uint32_t* const born = reinterpret_cast<uint32_t*>(next(4));
    ExportedRows wanted{RowPredicate(), changed_};
    if (changed_) wanted.changed->born = born;
    Rows rows;
    rows.n = table_->ExportRange(wanted, &progress_, most, out);
    if (rows.n == 0) return;
    table_->CopyOut(table_->numbers(), rows.n, nullptr, 0, layout_.row_bytes, contents);
    const size_t n = Count(rows.n);
    const auto fetch = [&](auto* column, const void* from, size_t width) {
      column->resize(n * width);
      table_->device_.Copy(column->data(), from, column->size() * sizeof((*column)[0]));
    };
    fetch(&rows.keys, out.keys, Count(KeyBytes()));
    fetch(&rows.freqs, out.freqs, 1);
    fetch(&rows.versions, out.versions, 1);
    fetch(&rows.scores, out.scores, 1);
    fetch(&rows.orders, out.orders, 1);
    fetch(&rows.contents, contents, Count(layout_.row_bytes));
    std::vector<uint32_t> births;
    if (changed_) fetch(&births, born, 1);
    table_->device_.WaitInside();
    if (changed_) {
      born_ += std::count_if(births.begin(), births.end(), [&](uint32_t era) { return era > changed_->era; });
    }
    rows.bytes = rows.n * row_bytes;
    rows_.push_back(std::move(rows));
    memory_->Grow(rows_.back().bytes);
  }

  // Gives the next n rows of the first block.
  int64_t Copy(int64_t n, const Buffers& out) {
    std::vector<RowLayout::Column> columns;
    for (const ColumnOut& column : out.columns) {
      if (column.generation != kAnyGeneration && column.generation > layout_.generation) {
        throw Error(ErrorCode::kFailedPrecondition,
                    "The slots of table '" + table_->options_.name +
                        "' changed while an export of it began: begin it again.");
      }
      columns.push_back(layout_.At(column.column, column.width, column.generation));
    }
    const Rows& rows = rows_.front();
    const auto copy = [&](void* to, const void* from, int64_t bytes) {
      if (to == nullptr) return;
      std::memcpy(to, static_cast<const char*>(from) + next_ * bytes, Count(n * bytes));
    };
    copy(out.keys, rows.keys.data(), KeyBytes());
    copy(out.freqs, rows.freqs.data(), 4);
    copy(out.versions, rows.versions.data(), 4);
    copy(out.scores, rows.scores.data(), 8);
    copy(out.orders, rows.orders.data(), 8);
    for (size_t c = 0; c < columns.size(); ++c) {
      char* to = static_cast<char*>(out.columns[c].data);
      const char* from = rows.contents.data() + next_ * layout_.row_bytes + columns[c].offset;
      for (int64_t i = 0; i < n; ++i, to += columns[c].bytes, from += layout_.row_bytes) {
        std::memcpy(to, from, Count(columns[c].bytes));
      }
    }
    next_ += n;
    if (next_ == rows.n) {
      memory_->Shrink(rows.bytes);
      rows_.pop_front();
      next_ = 0;
    }
    return n;
  }

  void LetWrite() {
    if (!holds_up_.load()) return;
    std::lock_guard<std::mutex> hold(table_->mutex_);
    LetWriteInside();
  }
  void LetWriteInside() {
    auto& all = table_->moments_;
    all.erase(std::remove(all.begin(), all.end(), this), all.end());
    holds_up_.store(false);
    table_->moment_read_.notify_all();
  }

  DeviceTableImpl* const table_;
  const std::shared_ptr<AsideMemory> memory_;
  const RowLayout layout_;
  std::optional<ChangedSince> changed_;  // only what was; else all rows
  uint64_t version_ = 0;
  std::vector<uint64_t> removed_;
  std::atomic<bool> holds_up_{false};  // writes wait
  std::atomic<bool> given_up_{false};

  mutable std::mutex mutex_;  // guards all below, once it has begun. Taken before the table's
  ExportProgress progress_;
  std::deque<Rows> rows_;  // that were read and not yet given
  int64_t next_ = 0;       // of the first of them
  int64_t left_ = 0;
  int64_t born_ = 0;
};

template <class Device>
void DeviceTableImpl<Device>::AwaitMoments(std::unique_lock<std::mutex>* hold) const {
  const auto holds_up = [&] {
    return std::any_of(moments_.begin(), moments_.end(),
                       [](MomentExporter* moment) { return moment->StillHoldsUp(); });
  };
  while (holds_up()) moment_read_.wait_for(*hold, std::chrono::milliseconds(100));
}

template <class Device>
void DeviceTableImpl<Device>::NoteWrites(int64_t n) {
  if (changes_.on()) device_.Launch(Count(n), NoteWritesBody{rows_.changes, numbers(), Count(n)});
}

template <class Device>
void DeviceTableImpl<Device>::ForgetAllChanges(ChangeLog::Why why) {
  changes_.Reset(&device_, why);
  rows_.changes = changes_.view();
}

template <class Device>
uint64_t DeviceTableImpl<Device>::TrackChanges(int64_t max_removed) {
  if (max_removed < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "A max_removed of " + std::to_string(max_removed) + "; expected 0 or more keys.");
  }
  const Operation operation(this, options_.stream);
  if (!changes_.on()) {
    changes_.Begin(&device_, max_removed, row_capacity_,
                   [this](size_t bytes) { return Allocate(bytes, MemoryPlace::kDevice, "what changes"); });
    rows_.changes = changes_.view();
  }
  return changes_.newest();
}

template <class Device>
bool DeviceTableImpl<Device>::tracks_changes() const {
  std::lock_guard<std::mutex> hold(mutex_);
  return changes_.on();
}

template <class Device>
void DeviceTableImpl<Device>::CheckTracksChanges() const {
  if (changes_.on()) return;
  throw Error(ErrorCode::kFailedPrecondition,
              "The table has no versions to cut: its changes are not tracked.");
}

template <class Device>
uint64_t DeviceTableImpl<Device>::CutChanges() {
  const Operation operation(this, options_.stream);
  CheckTracksChanges();
  const uint64_t version = changes_.Cut(&device_, 0, nullptr);
  rows_.changes = changes_.view();
  return version;
}

template <class Device>
std::string DeviceTableImpl<Device>::ChangesLost(uint64_t since) const {
  const Operation operation(this, options_.stream);
  return changes_.Lost(&device_, since);
}

template <class Device>
void DeviceTableImpl<Device>::ForgetChanges(uint64_t upto) {
  const Operation operation(this, options_.stream);
  changes_.Forget(upto);
  if (changes_.on()) rows_.changes = changes_.view();
}

template <class Device>
std::unique_ptr<kvtable::Exporter> DeviceTableImpl<Device>::ExportMoment(const MomentOptions& options,
                                                                         DeviceStream stream) {
  auto memory = options.aside != nullptr ? options.aside : std::make_shared<AsideMemory>();
  memory->NoteProgress();
  std::unique_ptr<MomentExporter> exporter;  // outlives the operation, whatever happens within
  const Operation operation(this, stream);
  if (options.since) {
    const std::string lost = changes_.Lost(&device_, *options.since);
    if (!lost.empty()) throw Error(ErrorCode::kFailedPrecondition, lost);
  }
  if (options.cut) CheckTracksChanges();
  exporter = std::make_unique<MomentExporter>(this, std::move(memory));
  exporter->Begin(options);
  return exporter;
}

}  // namespace kvtable
