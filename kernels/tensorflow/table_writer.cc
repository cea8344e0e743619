#include "table_writer.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <utility>

#include "bundle_columns.h"
#include "bundle_files.h"
#include "catch_errors.h"
#include "errors.h"
#include "expiry.h"
#include "table_metadata.h"

namespace kvtools {

namespace tf = tensorflow;

namespace {

constexpr int64_t kMostChunkBytes = int64_t{16} << 20;
constexpr int64_t kLeastChunkBytes = int64_t{1} << 20;
constexpr int64_t kColumnAlignment = 64;

std::string NameOf(tf::DataType dtype) {
  switch (dtype) {
    case tf::DT_FLOAT:
      return "float32";
    case tf::DT_HALF:
      return "float16";
    case tf::DT_DOUBLE:
      return "float64";
    default:
      return tf::DataTypeString(dtype);
  }
}

std::string PoliciesOf(const SavedTable& saved) {
  const kvtable::Table& table = *saved.table;
  std::string fields = saved.config.policies.Fields();
  if (CountsSteps(table)) {
    fields += ", \"versions\": \"steps\", \"step\": " + std::to_string(saved.step);
  }
  if (table.max_capacity() > 0) {
    fields = "\"max_capacity\": " + std::to_string(table.max_capacity()) +
             ", \"eviction\": " + JsonQuote(EvictionName(table.eviction())) +
             (HasEpochs(table.eviction()) ? ", \"epoch\": " + std::to_string(saved.epoch) : "") +
             (fields.empty() ? "" : ", ") + fields;
  }
  return fields.empty() ? "" : ", \"policies\": {" + fields + "}";
}

std::string MetaOf(const SavedTable& saved) {
  const TableConfig& config = saved.config;
  return "{\"layout\": " + std::to_string(kCheckpointLayout) + ", \"name\": " + JsonQuote(saved.name) +
         ", \"part\": " + std::to_string(saved.part) + ", \"parts\": " + std::to_string(saved.parts) +
         ", \"key_dtype\": " + JsonQuote(NameOf(config.key_dtype)) +
         ", \"value_dtype\": " + JsonQuote(NameOf(config.value_dtype)) +
         ", \"dim\": " + std::to_string(config.dim) + ", \"slots\": " + SlotsToJson(saved.schema.slots) +
         ", \"initializer\": " + InitializerToJson(saved.table->initializer()) + PoliciesOf(saved) +
         (saved.draws > 0 ? ", \"draws\": " + std::to_string(saved.draws) : "") +
         (saved.is_increment ? ", \"delta\": true" : "") + saved.more_meta + "}";
}

// One table's rows on their way into a bundle.
class RowsOf {
 public:
  RowsOf(SavedTable saved, BundleFiles* files) : saved_(std::move(saved)), files_(files) {}

  int64_t row_bytes() const { return row_bytes_; }
  int64_t max_rows() const { return saved_.exporter->max_rows(); }
  const std::string& variable() const { return saved_.config.name; }

  // All but the rows.
  absl::Status Begin() {
    const TableConfig& config = saved_.config;
    const std::string& x = saved_.prefix;
    TF_RETURN_IF_ERROR(files_->AddString(0, x + "-kvmeta", MetaOf(saved_)));
    const kvtable::Initializer initializer = saved_.table->initializer();
    if (initializer.kind == kvtable::Initializer::Kind::kRows) {
      tf::Tensor rows(config.value_dtype, tf::TensorShape({initializer.num_rows, config.dim}));
      std::memcpy(rows.data(), initializer.rows->data(), initializer.rows->size());
      TF_RETURN_IF_ERROR(files_->AddTensor(0, x + "-init", rows));
    }
    for (const auto& [column, tensor] : saved_.more) {
      TF_RETURN_IF_ERROR(files_->AddTensor(0, x + column, tensor));
    }
    Add("-keys", config.key_dtype, 0);
    Add("-freqs", tf::DT_UINT32, 0);
    Add("-versions", tf::DT_UINT32, 0);
    Add("-values", config.value_dtype, config.dim);
    for (const kvtable::SlotSpec& slot : saved_.schema.slots) {
      Add("-slot-" + slot.name, config.value_dtype, slot.width);
    }
    has_ranks_ = saved_.table->max_capacity() > 0;
    if (has_ranks_) {
      Add("-scores", tf::DT_UINT64, 0);
      Add("-orders", tf::DT_UINT64, 0);
    }
    return absl::OkStatus();
  }

  // Takes the next rows into `buffer`, as many as it has room for, and writes them. Sets `*rows` to their number:
  // 0 at the end. Any thread.
  absl::Status WriteChunk(int writer, char* buffer, int64_t bytes, kvtable::ParallelFor* threads,
                          int64_t* rows) {
    const int64_t room =
        std::max<int64_t>(1, (bytes - kColumnAlignment * static_cast<int64_t>(columns_.size())) / row_bytes_);
    std::vector<char*> at;
    for (const Column& column : columns_) {
      at.push_back(buffer);
      buffer += (room * column.row_bytes + kColumnAlignment - 1) / kColumnAlignment * kColumnAlignment;
    }
    int64_t start = 0;
    TF_RETURN_IF_ERROR(CatchErrors("saving", variable(), [&] {
      *rows = Take(at, room, threads, &start);
      return absl::OkStatus();
    }));
    for (size_t c = 0; c < columns_.size() && *rows > 0; ++c) {
      TF_RETURN_IF_ERROR(files_->AppendRows(writer, columns_[c].number, start, *rows, at[c]));
    }
    return absl::OkStatus();
  }

  // Says that the rows will be taken. Whether somebody waits for that.
  bool StillWanted() {
    const std::lock_guard<std::mutex> hold(mutex_);
    if (saved_.exporter == nullptr) return false;
    saved_.exporter->KeepAlive();
    return saved_.exporter->IsUrgent();
  }

  // What is known when all rows have been written.
  absl::Status End() {
    return saved_.is_increment ? files_->AddTensor(0, saved_.prefix + "-removed", removed_)
                               : absl::OkStatus();
  }

  // What a buffer takes for this many rows.
  int64_t BytesFor(int64_t rows) const {
    return rows * row_bytes_ + kColumnAlignment * static_cast<int64_t>(columns_.size());
  }

 private:
  struct Column {
    int number;  // in the bundle
    int64_t width;
    int64_t row_bytes;
  };

  void Add(const std::string& column, tf::DataType dtype, int64_t width) {
    const int64_t bytes = std::max<int64_t>(1, width) * tf::DataTypeSize(dtype);
    columns_.push_back({files_->AddColumn(saved_.prefix + column, dtype, width), width, bytes});
    row_bytes_ += bytes;
  }

  // Takes rows until there are `room` of them or no more. Returns how many there are, and the number of the first.
  int64_t Take(const std::vector<char*>& columns, int64_t room, kvtable::ParallelFor* threads,
               int64_t* start) {
    std::unique_lock<std::mutex> hold(mutex_);
    if (exhausted_) return 0;
    ++takers_;
    hold.unlock();
    int64_t n = 0;
    try {
      std::unique_lock<std::mutex> alone(one_taker_, std::defer_lock);
      if (!saved_.concurrent) alone.lock();
      n = TakeRows(columns, room, threads);
    } catch (...) {
      hold.lock();
      --takers_;
      throw;
    }
    hold.lock();
    --takers_;
    exhausted_ = exhausted_ || n < room;
    *start = taken_;
    taken_ += n;
    if (exhausted_ && takers_ == 0) CloseExporter();
    return n;
  }

  // When it has given all: it costs who writes to the table.
  void CloseExporter() {
    const int64_t removed = saved_.exporter->removed_rows();
    if (saved_.counts != nullptr) *saved_.counts = {taken_, removed, saved_.exporter->born_rows()};
    if (saved_.is_increment) {
      removed_ = tf::Tensor(saved_.config.key_dtype, tf::TensorShape({removed}));
      if (removed > 0) saved_.exporter->RemovedKeys(removed_.data());
    }
    saved_.exporter.reset();
  }

  int64_t TakeRows(const std::vector<char*>& columns, int64_t room, kvtable::ParallelFor* threads) const {
    const size_t slots = saved_.schema.slots.size();
    for (int64_t n = 0;;) {
      const auto at = [&](size_t c) { return columns[c] + n * columns_[c].row_bytes; };
      kvtable::Exporter::Buffers out;
      out.keys = at(0);
      out.freqs = reinterpret_cast<uint32_t*>(at(1));
      out.versions = reinterpret_cast<uint32_t*>(at(2));
      for (size_t c = 0; c <= slots; ++c) {
        out.columns.push_back(
            {static_cast<int>(c), at(3 + c), columns_[3 + c].width, saved_.schema.generation});
      }
      if (has_ranks_) {
        out.scores = reinterpret_cast<uint64_t*>(at(columns.size() - 2));
        out.orders = reinterpret_cast<uint64_t*>(at(columns.size() - 1));
      }
      const int64_t got = n < room ? saved_.exporter->Next(room - n, out, *threads) : 0;
      if (got == 0) return n;
      n += got;
    }
  }

  SavedTable saved_;
  BundleFiles* const files_;
  std::vector<Column> columns_;
  int64_t row_bytes_ = 0;
  bool has_ranks_ = false;
  std::mutex one_taker_;  // of an exporter that is not concurrent
  std::mutex mutex_;      // guards what follows, and the end of the exporter
  int takers_ = 0;
  bool exhausted_ = false;
  int64_t taken_ = 0;
  tf::Tensor removed_;  // keys, of an increment
};

using Clock = std::chrono::steady_clock;

// How many times as long as it worked a thread that saves beside training rests. What training loses to it is not the
// processor alone: copies and the disk take bandwidth of the memory that steps wait for.
constexpr int kRests = 3;
constexpr int64_t kWorkBytes = int64_t{12} << 20;  // from one rest to the next; a small increment has none
constexpr auto kMostRest = std::chrono::milliseconds(150);  // where the processors are busy, work takes long
constexpr auto kNap = std::chrono::milliseconds(2);

// After so long a work; ends at once where somebody waits for rows.
void Rest(Clock::duration worked, const std::vector<std::unique_ptr<RowsOf>>& all) {
  const Clock::time_point until = Clock::now() + std::min<Clock::duration>(kRests * worked, kMostRest);
  const auto wanted = [](const std::unique_ptr<RowsOf>& rows) { return rows->StillWanted(); };
  while (Clock::now() < until && std::none_of(all.begin(), all.end(), wanted))
    std::this_thread::sleep_for(kNap);
}

}  // namespace

absl::Status WriteTables(tf::Env* env, const std::string& prefix, std::vector<SavedTable> tables, int threads,
                         SavePriority priority, kvtable::ParallelFor* lent) {
  // A GPU's tables take one batch at a time, on the kernel's stream.
  bool on_gpu = false;
  for (const SavedTable& table : tables) on_gpu = on_gpu || table.config.gpu != nullptr;
  // Half of the processors, where training goes on beside.
  if (priority == SavePriority::kBeside) threads /= 2;
  BundleFiles files(env, prefix, std::max(1, threads));
  std::vector<std::unique_ptr<RowsOf>> all;
  int64_t bytes = 0, most = kLeastChunkBytes;
  for (SavedTable& table : tables) {
    all.push_back(std::make_unique<RowsOf>(std::move(table), &files));
    RowsOf& rows = *all.back();
    TF_RETURN_IF_ERROR(CatchErrors("saving", rows.variable(), [&] { return rows.Begin(); }));
    bytes += rows.max_rows() * rows.row_bytes();
    // Of a small table all rows go into one chunk, and the chunk of a large one has room for a row.
    most = std::max(most, std::min(kMostChunkBytes, rows.BytesFor(rows.max_rows() + 1)));
    most = std::max(most, rows.BytesFor(1));
  }
  const int workers =
      on_gpu ? 1 : static_cast<int>(std::min<int64_t>(files.writers(), 1 + bytes / kMostChunkBytes));
  const int64_t buffer_bytes = std::max(kLeastChunkBytes, std::min(most, kWriteBytes / workers));
  int64_t widest = 0;
  for (const auto& rows : all) widest = std::max(widest, rows->BytesFor(1));
  const int64_t room = std::max(buffer_bytes, widest);

  std::mutex mutex;
  absl::Status first_error;
  std::atomic<bool> failed{false};
  RunOnThreads(workers, priority, [&](int worker) {
    const absl::Status status = CatchErrors("saving", all.front()->variable(), [&]() -> absl::Status {
      const std::unique_ptr<char[]> buffer(new char[static_cast<size_t>(room)]);
      kvtable::ParallelFor* const helpers = on_gpu ? lent : &kvtable::Serial();
      // One table after the other; but training may wait for the rows of one whose turn is later.
      std::vector<bool> done(all.size());
      Clock::duration worked{};  // since the last rest
      int64_t written = 0;
      while (!failed.load(std::memory_order_relaxed)) {
        size_t next = all.size();
        bool urgent = false;
        for (size_t t = 0; t < all.size(); ++t) {
          if (done[t]) continue;
          const bool is_urgent = all[t]->StillWanted();
          if (next == all.size() || (is_urgent && !urgent)) next = t;
          urgent = urgent || is_urgent;
        }
        if (next == all.size()) break;
        int64_t n = 0;
        const Clock::time_point begin = Clock::now();
        TF_RETURN_IF_ERROR(all[next]->WriteChunk(worker, buffer.get(), room, helpers, &n));
        done[next] = n == 0;
        worked += Clock::now() - begin;
        written += all[next]->BytesFor(n);
        if (priority == SavePriority::kBeside && written >= kWorkBytes) {
          Rest(worked, all);
          worked = {};
          written = 0;
        }
      }
      return absl::OkStatus();
    });
    if (status.ok()) return;
    failed = true;
    const std::lock_guard<std::mutex> hold(mutex);
    if (first_error.ok()) first_error = status;
  });
  TF_RETURN_IF_ERROR(first_error);
  for (const auto& rows : all) TF_RETURN_IF_ERROR(rows->End());
  return files.Finish();
}

}  // namespace kvtools
