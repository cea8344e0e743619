#include "rows_in.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <utility>

#include "catch_errors.h"
#include "errors.h"
#include "expiry.h"
#include "kvtable/part_of.h"
#include "save_threads.h"
#include "table_metadata.h"

namespace kvtools {

namespace tf = tensorflow;

namespace {

constexpr int64_t kMostChunk = int64_t{16} << 20;
constexpr int64_t kAlignment = 64;
// Where there are few processors, twice as many threads, up to this: some wait for the disk.
constexpr int kWaiting = 8;

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// What is next to each other in a checkpoint was so in a shard, whose lock is for one thread at a time: so those that
// come at the same time are taken from as many places far from each other.
template <class Chunk>
std::vector<Chunk> Spread(const std::vector<Chunk>& chunks, int places) {
  const size_t apart = (chunks.size() + static_cast<size_t>(places) - 1) / static_cast<size_t>(places);
  std::vector<Chunk> spread;
  for (size_t i = 0; i < apart; ++i) {
    for (size_t at = i; at < chunks.size(); at += apart) spread.push_back(chunks[at]);
  }
  return spread;
}

// Whether a key, widened, is among others.
bool IsAmong(uint64_t key, const void* keys, int64_t n, tf::DataType dtype) {
  const auto has = [&](const auto* begin, auto wanted) {
    return std::find(begin, begin + n, wanted) != begin + n;
  };
  return dtype == tf::DT_INT32 ? has(static_cast<const int32_t*>(keys), static_cast<int32_t>(key))
                               : has(static_cast<const uint64_t*>(keys), key);
}

}  // namespace

// A part that is being read: its columns in the order keys, freqs, versions, scores, orders (those that there are),
// values, slots.
struct RowsIn::Part {
  const SavedPart* saved;
  bool with_scores = false;
  bool with_orders = false;
  std::vector<std::unique_ptr<ColumnReader>> columns;
};

// Who imports: anybody, or in the order of the chunks one after the other.
class RowsIn::Turns {
 public:
  explicit Turns(bool in_order) : in_order_(in_order) {}

  // Waits for chunk `number`'s turn. False where another thread failed.
  bool Wait(int64_t number) {
    std::unique_lock<std::mutex> hold(mutex_);
    turn_.wait(hold, [&] { return failed_ || !in_order_ || next_ == number; });
    return !failed_;
  }
  void Done() {
    const std::lock_guard<std::mutex> hold(mutex_);
    ++next_;
    turn_.notify_all();
  }
  void Fail(const absl::Status& status) {
    const std::lock_guard<std::mutex> hold(mutex_);
    failed_ = true;
    if (status_.ok()) status_ = status;
    turn_.notify_all();
  }
  bool failed() const {
    const std::lock_guard<std::mutex> hold(mutex_);
    return failed_;
  }
  const absl::Status& status() const { return status_; }

 private:
  const bool in_order_;
  mutable std::mutex mutex_;
  std::condition_variable turn_;
  int64_t next_ = 0;
  bool failed_ = false;
  absl::Status status_;
};

void RowsIn::Add(const SavedPart& saved, DataFiles* files) {
  auto part = std::make_shared<Part>();
  part->saved = &saved;
  // Scores of another kind are of no use here: the table starts from stamps then.
  part->with_scores =
      config_.max_capacity > 0 && saved.has_scores && saved.eviction == EvictionName(config_.eviction);
  part->with_orders = part->with_scores && saved.has_orders;
  const auto add = [&](const std::string& column) {
    part->columns.push_back(std::make_unique<ColumnReader>(where_, &saved.columns.at(column), files));
  };
  if (saved.rows == 0) return;  // a part that no step has reached may have no slots
  add("-keys");
  if (saved.has_freqs) add("-freqs");
  if (saved.has_versions) add("-versions");
  if (part->with_scores) add("-scores");
  if (part->with_orders) add("-orders");
  add("-values");
  for (const kvtable::SlotSpec& slot : slots_) add("-slot-" + slot.name);
  parts_.push_back(std::move(part));
}

int64_t RowsIn::RowBytes(const Part& part) const {
  int64_t bytes = 0;
  for (const auto& column : part.columns) bytes += column->row_bytes();
  return bytes;
}

absl::Status RowsIn::Read(kvtable::ParallelFor* threads) {
  // A GPU's table takes one batch at a time, on the kernel's stream. What a bounded one keeps must not depend
  // on which thread comes first.
  const bool on_gpu = config_.gpu != nullptr;
  const bool in_order = on_gpu || config_.max_capacity > 0;
  Turns turns(in_order);
  int64_t bytes = 0;
  for (const auto& part : parts_) bytes += part->saved->rows * RowBytes(*part);
  const int cpus = threads->threads();
  const int workers = on_gpu ? 1
                             : static_cast<int>(std::min<int64_t>(
                                   std::max(cpus, std::min(2 * cpus, kWaiting)), 1 + bytes / kMostChunk));
  int64_t room = std::min(kMostChunk, kReadBytes / std::max(1, workers));
  std::vector<Chunk> chunks;
  for (const auto& part : parts_) {
    const int64_t aligned = kAlignment * static_cast<int64_t>(part->columns.size());
    const int64_t most = std::max<int64_t>(1, (room - aligned) / RowBytes(*part));
    for (const StoredRun& run : part->saved->columns.at("-keys").runs) {
      // Of about the same size, since the last one of a run costs as much as any.
      const int64_t pieces = (run.rows + most - 1) / most;
      for (int64_t i = 0; i < pieces; ++i) {
        const int64_t begin = run.rows * i / pieces, end = run.rows * (i + 1) / pieces;
        chunks.push_back({part.get(), run.start + begin, end - begin});
      }
    }
  }
  if (!in_order) chunks = Spread(chunks, workers);
  int64_t buffer_bytes = 1;
  for (const Chunk& chunk : chunks) {
    int64_t needed = 0;
    for (const auto& column : chunk.part->columns) needed += Aligned(chunk.rows * column->row_bytes());
    buffer_bytes = std::max(buffer_bytes, needed);
  }
  std::atomic<int64_t> next{0};
  RunOnThreads(workers, SavePriority::kUsual, [&](int) {
    const absl::Status status = CatchErrors("restoring", config_.name, [&]() -> absl::Status {
      const std::unique_ptr<char[]> buffer(new char[static_cast<size_t>(buffer_bytes)]);
      while (!turns.failed()) {
        const int64_t number = next.fetch_add(1);
        if (number >= static_cast<int64_t>(chunks.size())) break;
        TF_RETURN_IF_ERROR(ReadChunk(chunks[static_cast<size_t>(number)], buffer.get(), number, &turns,
                                     workers == 1 ? threads : &kvtable::Serial()));
      }
      return absl::OkStatus();
    });
    if (!status.ok()) turns.Fail(status);
  });
  TF_RETURN_IF_ERROR(turns.status());
  for (const auto& part : parts_) {
    for (const auto& column : part->columns) TF_RETURN_IF_ERROR(column->Finish());
  }
  return absl::OkStatus();
}

template <class Key>
void RowsIn::FindOwn(const void* keys, int64_t rows, std::vector<int64_t>* own) const {
  const Key* const all = static_cast<const Key*>(keys);
  const kvtable::PartOf<Key> part_of(own_parts);
  for (int64_t i = 0; i < rows; ++i) {
    if (part_of(all[i]) == own_part) own->push_back(i);
  }
}

absl::Status RowsIn::ReadChunk(const Chunk& chunk, char* buffer, int64_t number, Turns* turns,
                               kvtable::ParallelFor* threads) {
  const Part& part = *chunk.part;
  std::vector<char*> columns;
  for (const auto& column : part.columns) {
    columns.push_back(buffer);
    buffer += Aligned(chunk.rows * column->row_bytes());
    TF_RETURN_IF_ERROR(column->Read(chunk.start, chunk.rows, columns.back()));
  }
  int64_t rows = chunk.rows;
  if (own_parts > 1) {
    std::vector<int64_t> own;
    own.reserve(static_cast<size_t>(rows / own_parts + 1));
    switch (config_.key_dtype) {
      case tf::DT_INT32:
        FindOwn<int32_t>(columns[0], rows, &own);
        break;
      case tf::DT_UINT64:
        FindOwn<uint64_t>(columns[0], rows, &own);
        break;
      default:
        FindOwn<int64_t>(columns[0], rows, &own);
    }
    const int64_t others = rows - static_cast<int64_t>(own.size());
    if (others > 0 && all_own) {
      return Damaged(where_, part.saved->prefix + "-keys", "has ", others,
                     " keys that belong to other parts");
    }
    for (size_t c = 0; c < columns.size() && others > 0; ++c) {
      const int64_t bytes = part.columns[c]->row_bytes();
      for (size_t i = 0; i < own.size(); ++i) {
        std::memmove(columns[c] + static_cast<int64_t>(i) * bytes, columns[c] + own[i] * bytes,
                     static_cast<size_t>(bytes));
      }
    }
    rows = static_cast<int64_t>(own.size());
  }
  const std::optional<uint64_t>& padding_key = config_.policies.padding_key;
  if (padding_key && IsAmong(*padding_key, columns[0], rows, config_.key_dtype)) has_padding_ = true;
  size_t at = 1;
  const auto stamps = [&](bool has) {
    return has ? reinterpret_cast<const uint32_t*>(columns[at++]) : nullptr;
  };
  const uint32_t* const freqs = stamps(part.saved->has_freqs);
  const uint32_t* versions = stamps(part.saved->has_versions);
  kvtable::RanksIn ranks;
  if (part.with_scores) ranks.scores = reinterpret_cast<const uint64_t*>(columns[at++]);
  if (part.with_orders) ranks.orders = reinterpret_cast<const uint64_t*>(columns[at++]);
  std::vector<kvtable::ColumnIn> in = {{0, columns[at++], config_.dim}};
  for (size_t s = 0; s < slots_.size(); ++s) {
    in.push_back({static_cast<int>(s) + 1, columns[at++], slots_[s].width});
  }
  // Steps are no seconds, and without the step that they are counted from no age: the ages of such rows begin now.
  std::vector<uint32_t> now;
  const bool has_ages = CountsSteps(*table_) ? part.saved->step.has_value() : !part.saved->counts_steps;
  if (!has_ages && versions != nullptr) {
    now.assign(static_cast<size_t>(rows), table_->Now());
    versions = now.data();
  }
  if (!turns->Wait(number)) return absl::OkStatus();
  table_->Import(columns[0], rows, in, freqs, versions, ranks, *threads);
  turns->Done();
  return absl::OkStatus();
}

}  // namespace kvtools
