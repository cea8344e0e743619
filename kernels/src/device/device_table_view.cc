#include "kvtable/device_table_view.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "admission/admission_draw.h"
#include "values/elements.h"

namespace kvtable {
namespace {

constexpr int64_t kChunkBytes = int64_t{64} << 20;  // of host arrays that are on the device at a time
constexpr int64_t kSmallChunk = 64;                 // rows

// The arrays of one operation: where the device can reach them, and back again.
class Arrays {
 public:
  Arrays(DeviceWork* work, ArraysIn where, DeviceStream stream)
      : work_(work), where_(where), stream_(stream) {}

  template <class T>
  const T* In(const T* array, int64_t bytes) {
    if (array == nullptr || where_ == ArraysIn::kDevice) return array;
    void* const there = New(bytes);
    work_->QueueCopy(there, array, static_cast<size_t>(bytes), stream_);
    return static_cast<const T*>(there);
  }

  template <class T>
  T* Out(T* array, int64_t bytes) {
    if (array == nullptr || where_ == ArraysIn::kDevice) return array;
    void* const there = New(bytes);
    outs_.push_back({array, there, static_cast<size_t>(bytes)});
    return static_cast<T*>(there);
  }

  // Memory of the device alone, for this operation.
  void* New(int64_t bytes) {
    held_.push_back(work_->NewArray(static_cast<size_t>(bytes), stream_));
    return held_.back().get();
  }

  // Waits for what there is to wait for.
  void Finish() {
    for (const Output& out : outs_) work_->QueueCopy(out.here, out.there, out.bytes, stream_);
    if (where_ == ArraysIn::kHost) work_->Wait(stream_);
  }

 private:
  struct Output {
    void* here;
    void* there;
    size_t bytes;
  };

  DeviceWork* const work_;
  const ArraysIn where_;
  const DeviceStream stream_;
  std::vector<std::shared_ptr<void>> held_;
  std::vector<Output> outs_;
};

class View : public Table {
 public:
  View(std::shared_ptr<DeviceTable> table, std::shared_ptr<DeviceWork> work, ArraysIn where)
      : table_(std::move(table)),
        work_(std::move(work)),
        where_(where),
        key_bytes_(SizeOf(table_->options().key_type)),
        element_bytes_(SizeOf(table_->options().value_type)),
        value_bytes_(table_->options().dim * element_bytes_) {}

  DeviceTable* table() const { return table_.get(); }
  std::shared_ptr<Table> InPlace() const {
    auto made = std::make_shared<View>(table_, work_, ArraysIn::kDevice);
    made->set_admitter(admitter());
    return made;
  }

  KeyType key_type() const override { return table_->options().key_type; }
  ValueType value_type() const override { return table_->options().value_type; }
  int64_t dim() const override { return table_->options().dim; }
  Initializer initializer() const override { return table_->initializer(); }
  RowSchema schema() const override { return table_->schema(); }
  uint64_t generation() const override { return table_->generation(); }
  int64_t Size() const override { return table_->Size(); }
  int MaxProbeLength() const override { return 0; }  // nobody counts them there

  MemoryUse Memory() const override {
    const DeviceMemoryUse use = table_->Memory();
    return {use.rows, use.row_bytes, use.index_bytes, use.column_bytes, use.slack_bytes};
  }

  // ---- Lookups

  void Gather(const void* keys, int64_t n, const RowsOut& out, Missing missing, const void* defaults,
              int64_t num_defaults, bool* found, ParallelFor& threads) const override {
    RefuseFloat32(out.widened);
    if (num_defaults > 0 && where_ == ArraysIn::kHost) {
      return GatherChunk(keys, n, out, missing, defaults, num_defaults, found, threads);
    }
    InChunks(n, key_bytes_ + value_bytes_, [&](int64_t begin, int64_t count) {
      GatherChunk(KeyAt(keys, begin), count, At(out, begin), missing, defaults, num_defaults,
                  found == nullptr ? nullptr : found + begin, threads);
    });
  }

  void GatherOrInsert(const void* keys, int64_t n, const RowsOut& out, const Insertion& insertion,
                      ParallelFor& threads) override {
    RefuseFloat32(out.widened);
    if (insertion.admitter != nullptr) return GatherOrAdmit(keys, n, out, insertion, threads);
    const DeviceStream stream = StreamOf(threads);
    Arrays arrays(work_.get(), where_, stream);
    RowBuffer rows(this, out, n, &arrays);
    DeviceInsertion device;
    device.stamp = insertion.stamp;
    device.inserted = arrays.Out(insertion.inserted, n);
    device.admission = insertion.admission;
    device.admission_seed = insertion.admission_seed;
    device.below = insertion.below;
    DeviceEvicted evicted{};
    if (insertion.evicted != nullptr) {
      evicted.keys = arrays.New(n * key_bytes_);
      evicted.values = arrays.New(n * value_bytes_);
      evicted.count = static_cast<uint64_t*>(arrays.New(sizeof(uint64_t)));
      evicted.capacity = n;
      work_->Fill(evicted.count, 0, sizeof(uint64_t), stream);
      device.evicted = &evicted;
    }
    table_->GatherOrInsert(Batch(keys, n, &arrays), rows.device(), device, stream);
    arrays.Finish();
    rows.Finish();
    NotePositions(keys, n, out, insertion.admission >= 1.0 && !table_->options().padding_key, threads);
    if (insertion.evicted != nullptr) CopyEvicted(evicted, insertion.evicted, stream);
  }

  void GatherColumns(const void* keys, int64_t n, const std::vector<ColumnOut>& out, bool* found,
                     ParallelFor& threads) const override {
    InChunks(n, key_bytes_ + RowBytes(out), [&](int64_t begin, int64_t count) {
      Arrays arrays(work_.get(), where_, StreamOf(threads));
      std::vector<ColumnOut> columns = out;
      for (ColumnOut& column : columns) {
        const int64_t bytes = column.width * element_bytes_;
        column.data = arrays.Out(static_cast<char*>(column.data) + begin * bytes, count * bytes);
      }
      bool* const there = found == nullptr ? nullptr : arrays.Out(found + begin, count);
      table_->GatherColumns(Batch(KeyAt(keys, begin), count, &arrays), columns, there, StreamOf(threads));
      arrays.Finish();
    });
  }

  void Contains(const void* keys, int64_t n, bool* out, ParallelFor& threads) const override {
    Arrays arrays(work_.get(), where_, StreamOf(threads));
    bool* const there = arrays.Out(out, n);
    table_->Contains(Batch(keys, n, &arrays), there, StreamOf(threads));
    arrays.Finish();
  }

  void GatherStamps(const void* keys, int64_t n, uint32_t* freqs, uint32_t* versions,
                    ParallelFor& threads) const override {
    Arrays arrays(work_.get(), where_, StreamOf(threads));
    uint32_t* const device_freqs = arrays.Out(freqs, n * 4);
    uint32_t* const device_versions = arrays.Out(versions, n * 4);
    table_->GatherStamps(Batch(keys, n, &arrays), device_freqs, device_versions, StreamOf(threads));
    arrays.Finish();
  }

  void Locate(const void* keys, int64_t n, uint64_t* positions, ParallelFor& threads) const override {
    Arrays arrays(work_.get(), where_, StreamOf(threads));
    uint64_t* const there = arrays.Out(positions, n * 8);
    table_->Positions(Batch(keys, n, &arrays), there, StreamOf(threads));
    arrays.Finish();
  }

  void KeysAt(const uint64_t*, int64_t, void*) const override {
    throw Error(ErrorCode::kFailedPrecondition,
                "Table '" + table_->options().name + "' is in device memory, where rows have no positions.");
  }

  // ---- Writes

  void Upsert(const void* keys, int64_t n, const void* values, Stamp stamp, ParallelFor& threads) override {
    UpsertColumns(keys, n, {{0, values, dim()}}, stamp, threads);
  }

  void UpsertColumns(const void* keys, int64_t n, const std::vector<ColumnIn>& in, Stamp stamp,
                     ParallelFor& threads) override {
    Arrays arrays(work_.get(), where_, StreamOf(threads));
    const std::vector<ColumnIn> columns = ColumnsOf(in, 0, n, &arrays);
    table_->UpsertColumns(Batch(keys, n, &arrays), columns, stamp, StreamOf(threads));
    arrays.Finish();
  }

  void Accumulate(const void* keys, int64_t n, const void* deltas, bool from_zeros, Stamp stamp,
                  ParallelFor& threads) override {
    Arrays arrays(work_.get(), where_, StreamOf(threads));
    const void* const device_deltas = arrays.In(deltas, n * value_bytes_);
    table_->Accumulate(Batch(keys, n, &arrays), device_deltas, from_zeros, stamp, StreamOf(threads));
    arrays.Finish();
  }

  void Combine(const void* keys, int64_t n, const void* operands, RowOp op, Stamp stamp,
               ParallelFor& threads) override {
    Arrays arrays(work_.get(), where_, StreamOf(threads));
    const void* const device_operands = arrays.In(operands, n * value_bytes_);
    table_->Combine(Batch(keys, n, &arrays), device_operands, op, stamp, StreamOf(threads));
    arrays.Finish();
  }

  // Counts nothing: SkippedUpdates knows.
  ApplyCounts Apply(const void* keys, const uint64_t* /*positions*/, int64_t n, const GradientsIn& gradients,
                    const Update& update, const SlotColumns& slots, Stamp stamp,
                    ParallelFor& threads) override {
    RefuseFloat32(update.float32_gradients);
    if (gradients.places != nullptr) {
      throw Error(ErrorCode::kFailedPrecondition,
                  "A table on a GPU takes gradients in the order of its keys.");
    }
    Arrays arrays(work_.get(), where_, StreamOf(threads));
    const void* const device_gradients = arrays.In(gradients.rows, n * value_bytes_);
    table_->Apply(Batch(keys, n, &arrays), device_gradients, update, slots, stamp, StreamOf(threads));
    arrays.Finish();
    return {};
  }

  void Zeroed(const void* keys, int64_t n, bool* out, ParallelFor& threads) const override {
    Arrays arrays(work_.get(), where_, StreamOf(threads));
    bool* const there = arrays.Out(out, n);
    table_->Zeroed(Batch(keys, n, &arrays), there, StreamOf(threads));
    arrays.Finish();
  }
  int64_t ZeroedRows() const override { return table_->ZeroedRows(); }
  int64_t SkippedUpdates() const override { return table_->SkippedUpdates(); }

  void IncreaseFrequency(const void* keys, int64_t n, const uint32_t* by, ParallelFor& threads) override {
    Arrays arrays(work_.get(), where_, StreamOf(threads));
    const uint32_t* const device_by = arrays.In(by, n * 4);
    table_->IncreaseFrequency(Batch(keys, n, &arrays), device_by, StreamOf(threads));
    arrays.Finish();
  }

  int64_t Remove(const void* keys, int64_t n, ParallelFor& threads) override {
    const DeviceStream stream = StreamOf(threads);
    Arrays arrays(work_.get(), where_, stream);
    uint64_t removed = 0;
    uint64_t* const count = static_cast<uint64_t*>(arrays.New(sizeof(removed)));
    work_->Fill(count, 0, sizeof(removed), stream);
    table_->Remove(Batch(keys, n, &arrays), count, stream);
    work_->Copy(&removed, count, sizeof(removed), stream);
    return static_cast<int64_t>(removed);
  }

  void Clear() override { table_->Clear(table_->options().stream); }
  void Reserve(int64_t rows, ParallelFor& threads) override { table_->Reserve(rows, 0, StreamOf(threads)); }

  uint64_t EnsureSlots(const std::vector<SlotSpec>& slots, ParallelFor& threads) override {
    return table_->EnsureSlots(slots, StreamOf(threads));
  }

  // ---- Export and import

  std::unique_ptr<Exporter> Export() const override;
  std::unique_ptr<Exporter> ExportMoment(const MomentOptions& options) override {
    return table_->ExportMoment(options, table_->options().stream);
  }
  uint64_t TrackChanges(int64_t max_removed) override { return table_->TrackChanges(max_removed); }
  bool tracks_changes() const override { return table_->tracks_changes(); }
  uint64_t CutChanges() override { return table_->CutChanges(); }
  std::string ChangesLost(uint64_t since) const override { return table_->ChangesLost(since); }
  void ForgetChanges(uint64_t upto) override { table_->ForgetChanges(upto); }

  void Import(const void* keys, int64_t n, const std::vector<ColumnIn>& in, const uint32_t* freqs,
              const uint32_t* versions, const RanksIn& ranks, ParallelFor& threads) override {
    InChunks(n, key_bytes_ + RowBytes(in), [&](int64_t begin, int64_t count) {
      Arrays arrays(work_.get(), where_, StreamOf(threads));
      const std::vector<ColumnIn> columns = ColumnsOf(in, begin, count, &arrays);
      const uint32_t* const device_freqs = freqs == nullptr ? nullptr : arrays.In(freqs + begin, count * 4);
      const uint32_t* const device_versions =
          versions == nullptr ? nullptr : arrays.In(versions + begin, count * 4);
      RanksIn there;
      if (ranks.scores != nullptr) there.scores = arrays.In(ranks.scores + begin, count * 8);
      if (ranks.orders != nullptr) {
        there.orders = arrays.In(ranks.orders + begin, count * 8);
        there.highest_order = ranks.highest_order;
        if (where_ == ArraysIn::kHost && count > 0) {
          there.highest_order = *std::max_element(ranks.orders + begin, ranks.orders + begin + count);
        }
      }
      table_->Import(Batch(KeyAt(keys, begin), count, &arrays), columns, device_freqs, device_versions, there,
                     StreamOf(threads));
      arrays.Finish();
    });
  }

  // ---- Bounded tables

  void SetEpoch(uint32_t epoch) override { table_->SetEpoch(epoch); }
  uint32_t epoch() const override { return table_->epoch(); }
  int64_t max_capacity() const override { return table_->options().max_capacity; }
  Eviction eviction() const override { return table_->options().eviction; }
  int64_t EvictedCount() const override { return table_->EvictedCount(); }

  void Scores(const void* keys, int64_t n, uint64_t* scores, ParallelFor& threads) const override {
    Arrays arrays(work_.get(), where_, StreamOf(threads));
    uint64_t* const there = arrays.Out(scores, n * 8);
    table_->Scores(Batch(keys, n, &arrays), there, StreamOf(threads));
    arrays.Finish();
  }

  int64_t SetScores(const void* keys, int64_t n, const uint64_t* scores, ParallelFor& threads) override {
    const DeviceStream stream = StreamOf(threads);
    Arrays arrays(work_.get(), where_, stream);
    const DeviceKeys batch = Batch(keys, n, &arrays);
    table_->SetScores(batch, arrays.In(scores, n * 8), stream);
    bool* const there = static_cast<bool*>(arrays.New(n));
    table_->Contains(batch, there, stream);
    const std::unique_ptr<bool[]> found = std::make_unique<bool[]>(static_cast<size_t>(n));
    work_->Copy(found.get(), there, static_cast<size_t>(n), stream);
    return std::count(found.get(), found.get() + n, true);
  }

  // ---- Expiry

  const Expiry& expiry() const override { return table_->options().expiry; }
  uint32_t Now() const override { return table_->Now(); }
  void SetStep(uint32_t step) override { table_->SetStep(step); }
  int64_t PassLength() const override { return table_->PassLength(); }
  int64_t ExpiredCount() const override { return table_->ExpiredCount(); }

  // Where arrays are in device memory, counts nothing and waits for nothing.
  int64_t EvictSlice(const RowTest& test, PassCursor* cursor, int64_t most_rows,
                     ParallelFor& threads) override {
    const DeviceStream stream = StreamOf(threads);
    if (where_ == ArraysIn::kDevice) {
      table_->EvictSlice(test, cursor, most_rows, nullptr, stream);
      return 0;
    }
    Arrays arrays(work_.get(), where_, stream);
    uint64_t removed = 0;
    uint64_t* const count = static_cast<uint64_t*>(arrays.New(sizeof(removed)));
    table_->EvictSlice(test, cursor, most_rows, count, stream);
    work_->Copy(&removed, count, sizeof(removed), stream);
    return static_cast<int64_t>(removed);
  }

  void CountRanks(const RankDigit& digit, PassCursor* cursor, int64_t most_rows, int64_t* counts,
                  ParallelFor& threads) const override {
    const DeviceStream stream = StreamOf(threads);
    Arrays arrays(work_.get(), where_, stream);
    std::vector<uint32_t> of_slice(RankDigit::kValues);
    const size_t bytes = of_slice.size() * sizeof(uint32_t);
    uint32_t* const there = static_cast<uint32_t*>(arrays.New(static_cast<int64_t>(bytes)));
    work_->Fill(there, 0, bytes, stream);
    table_->CountRanks(digit, cursor, most_rows, there, stream);
    work_->Copy(of_slice.data(), there, bytes, stream);
    for (size_t v = 0; v < of_slice.size(); ++v) counts[v] += of_slice[v];
  }

  void SetInitializer(const Initializer& initializer) override {
    table_->SetInitializer(initializer, table_->options().stream);
  }

 private:
  friend class ViewExporter;

  // Where a lookup's rows go: to the caller's array, or through one whose rows find their places afterwards.
  class RowBuffer {
   public:
    RowBuffer(const View* view, const RowsOut& out, int64_t n, Arrays* arrays)
        : out_(out), n_(n), row_bytes_(view->value_bytes_) {
      if (out.where != nullptr) {
        if (view->where_ == ArraysIn::kDevice) {
          throw Error(ErrorCode::kInvalidArgument, "Rows in device memory go where their keys are.");
        }
        host_.resize(static_cast<size_t>(n * row_bytes_));
      }
      device_ = arrays->Out(out.where == nullptr ? out.rows : host_.data(), n * row_bytes_);
    }
    void* device() const { return device_; }
    void Finish() const {
      for (int64_t i = 0; i < n_ && out_.where != nullptr; ++i) {
        std::memcpy(out_.rows + out_.where[i] * row_bytes_, host_.data() + i * row_bytes_,
                    static_cast<size_t>(row_bytes_));
      }
    }

   private:
    const RowsOut out_;
    const int64_t n_;
    const int64_t row_bytes_;
    std::vector<char> host_;
    void* device_ = nullptr;
  };

  void RefuseFloat32(bool wanted) const {
    if (!wanted) return;
    throw Error(ErrorCode::kFailedPrecondition,
                "Table '" + table_->options().name +
                    "' is in device memory, where rows of 16 bits are looked up and " +
                    "trained in their own type only.");
  }

  DeviceStream StreamOf(const ParallelFor& threads) const {
    return threads.stream() != nullptr ? threads.stream() : table_->options().stream;
  }

  const void* KeyAt(const void* keys, int64_t i) const {
    return static_cast<const char*>(keys) + i * key_bytes_;
  }

  RowsOut At(const RowsOut& out, int64_t begin) const {
    if (out.where != nullptr) return out.WithPlaces(out.where + begin);
    return {out.rows + begin * value_bytes_, out.positions == nullptr ? nullptr : out.positions + begin};
  }

  DeviceKeys Batch(const void* keys, int64_t n, Arrays* arrays) const {
    return {arrays->In(keys, n * key_bytes_), n};
  }

  // In host memory a piece at a time, so that the device's memory does not have to hold it all.
  template <class Body>
  void InChunks(int64_t n, int64_t bytes_each, const Body& body) const {
    const int64_t most = where_ == ArraysIn::kDevice ? std::max<int64_t>(n, 1)
                                                     : std::max<int64_t>(1, kChunkBytes / bytes_each);
    for (int64_t begin = 0; begin == 0 || begin < n; begin += most) body(begin, std::min(most, n - begin));
  }

  void GatherChunk(const void* keys, int64_t n, const RowsOut& out, Missing missing, const void* defaults,
                   int64_t num_defaults, bool* found, ParallelFor& threads) const {
    const DeviceStream stream = StreamOf(threads);
    Arrays arrays(work_.get(), where_, stream);
    RowBuffer rows(this, out, n, &arrays);
    bool* const there = arrays.Out(found, n);
    table_->Gather(Batch(keys, n, &arrays), rows.device(), missing,
                   arrays.In(defaults, num_defaults * value_bytes_), num_defaults, there, stream);
    arrays.Finish();
    rows.Finish();
    NotePositions(keys, n, out, false, threads);
  }

  // What is counted is counted on the host: the device is asked which keys have a row, and gets those that are
  // to have one.
  void GatherOrAdmit(const void* keys, int64_t n, const RowsOut& out, const Insertion& insertion,
                     ParallelFor& threads) {
    const DeviceStream stream = StreamOf(threads);
    const std::lock_guard<std::mutex> one_at_a_time(insertion.admitter->lookup_mutex());
    const size_t count = static_cast<size_t>(n);
    const std::unique_ptr<bool[]> there = std::make_unique<bool[]>(count);
    {
      Arrays arrays(work_.get(), where_, stream);
      bool* const device_there = static_cast<bool*>(arrays.New(n));
      table_->Contains(Batch(keys, n, &arrays), device_there, stream);
      work_->Copy(there.get(), device_there, count, stream);
    }
    const bool bounded = table_->options().max_capacity > 0;
    Insertion rest = insertion;
    rest.admitter = nullptr;
    if (std::find(there.get(), there.get() + n, false) == there.get() + n) {
      if (bounded) return GatherOrInsert(keys, n, out, rest, threads);
      return Gather(keys, n, out, insertion.below, nullptr, 0, nullptr, threads);
    }

    std::vector<char> copied;
    const char* host_keys = static_cast<const char*>(keys);
    if (where_ == ArraysIn::kDevice) {
      copied.resize(count * static_cast<size_t>(key_bytes_));
      work_->Copy(copied.data(), keys, copied.size(), stream);
      host_keys = copied.data();
    }
    const AdmissionDraw draw(insertion.admission, insertion.admission_seed, table_->options().padding_key);
    std::vector<uint64_t> missed;
    std::vector<int64_t> places;
    for (int64_t i = 0; i < n; ++i) {
      if (there[static_cast<size_t>(i)]) continue;
      const uint64_t key = WidenedAt(host_keys, i);
      if (!draw.Admits(key)) continue;
      missed.push_back(key);
      places.push_back(i);
    }
    AdmittedKeys admitted(insertion.admitter);
    const size_t candidates = missed.size();
    // Nobody else inserts meanwhile.
    const uint32_t* const first = admitted.Admit(
        std::move(missed),
        [](const uint64_t*, int64_t keys_asked, bool* has_row) { std::fill_n(has_row, keys_asked, false); });

    // The keys that become rows; in a bounded table with those that are touched, so that the batch is one.
    std::vector<char> batch, born;
    std::vector<uint32_t> starts;
    std::unordered_set<uint64_t> seen;
    const auto add = [&](std::vector<char>* to, int64_t i) {
      to->insert(to->end(), host_keys + i * key_bytes_, host_keys + (i + 1) * key_bytes_);
    };
    size_t next = 0;
    for (int64_t i = 0; i < n; ++i) {
      const bool is_candidate = next < candidates && places[next] == i;
      const uint32_t start = is_candidate ? first[next++] : Admitter::kLeftOut;
      if (start == Admitter::kLeftOut) {
        if (bounded && there[static_cast<size_t>(i)]) add(&batch, i);
        continue;
      }
      add(&batch, i);
      if (seen.insert(WidenedAt(host_keys, i)).second) {
        add(&born, i);
        starts.push_back(start);
      }
    }
    if (!batch.empty()) {
      View host(table_, work_, ArraysIn::kHost);
      const int64_t rows = static_cast<int64_t>(batch.size()) / key_bytes_;
      std::vector<char> values(static_cast<size_t>(rows * value_bytes_));
      rest.admission = 1.0;
      rest.inserted = nullptr;
      host.GatherOrInsert(batch.data(), rows, RowsOut(values.data()), rest, threads);
      host.IncreaseFrequency(born.data(), static_cast<int64_t>(starts.size()), starts.data(), threads);
    }
    Gather(keys, n, out, insertion.below, nullptr, 0, nullptr, threads);
  }

  uint64_t WidenedAt(const char* host_keys, int64_t i) const {
    if (key_bytes_ == 4) return WidenKey(reinterpret_cast<const int32_t*>(host_keys)[i]);
    return reinterpret_cast<const uint64_t*>(host_keys)[i];
  }

  // No update begins at positions here, but they say which keys have a row.
  void NotePositions(const void* keys, int64_t n, const RowsOut& out, bool all_are_there,
                     ParallelFor& threads) const {
    if (out.positions == nullptr) return;
    if (out.where != nullptr) {
      std::vector<uint64_t> found(static_cast<size_t>(n));
      Locate(keys, n, found.data(), threads);
      for (int64_t i = 0; i < n; ++i) out.positions[out.where[i]] = found[static_cast<size_t>(i)];
    } else if (!all_are_there) {
      Locate(keys, n, out.positions, threads);
    } else if (where_ == ArraysIn::kHost) {
      std::fill_n(out.positions, n, 0);
    } else {
      work_->Fill(out.positions, 0, static_cast<size_t>(n) * sizeof(uint64_t), StreamOf(threads));
    }
  }

  template <class Column>
  int64_t RowBytes(const std::vector<Column>& columns) const {
    int64_t elements = 0;
    for (const Column& column : columns) elements += column.width;
    return elements * element_bytes_;
  }

  std::vector<ColumnIn> ColumnsOf(const std::vector<ColumnIn>& in, int64_t begin, int64_t n,
                                  Arrays* arrays) const {
    std::vector<ColumnIn> columns = in;
    for (ColumnIn& column : columns) {
      const int64_t bytes = column.width * element_bytes_;
      column.data = arrays->In(static_cast<const char*>(column.data) + begin * bytes, n * bytes);
    }
    return columns;
  }

  void CopyEvicted(const DeviceEvicted& evicted, EvictedRows* out, DeviceStream stream) const {
    uint64_t count = 0;
    work_->Copy(&count, evicted.count, sizeof(count), stream);
    if (count == 0) return;
    void* keys = nullptr;
    void* values = nullptr;
    out->Allocate(static_cast<int64_t>(count), &keys, &values);
    work_->QueueCopy(keys, evicted.keys, count * static_cast<size_t>(key_bytes_), stream);
    work_->Copy(values, evicted.values, count * static_cast<size_t>(value_bytes_), stream);
  }

  const std::shared_ptr<DeviceTable> table_;
  const std::shared_ptr<DeviceWork> work_;
  const ArraysIn where_;
  const int64_t key_bytes_;
  const int64_t element_bytes_;
  const int64_t value_bytes_;
};

// Into arrays in host memory, whatever the view's.
class ViewExporter : public Exporter {
 public:
  explicit ViewExporter(const View* view)
      : view_(view), exporter_(view->table_->Export(RowPredicate())), left_(exporter_->max_rows()) {}

  int64_t max_rows() const override { return left_; }

  int64_t Next(int64_t capacity, const Buffers& out, ParallelFor& threads) override {
    const int64_t row_bytes = view_->key_bytes_ + 24 + view_->RowBytes(out.columns);
    int64_t rows = 0;
    if (held_ == next_held_ && capacity >= kSmallChunk) {
      rows = Read(std::min(capacity, std::max(kSmallChunk, kChunkBytes / row_bytes)), out, threads);
    } else {
      if (held_ == next_held_) ReadAhead(out, threads);
      rows = std::min(capacity, held_ - next_held_);
      CopyHeld(rows, out);
    }
    left_ = std::max<int64_t>(0, left_ - rows);
    if (rows == 0) left_ = 0;
    return rows;
  }

 private:
  // As many as there are, 0 at the end.
  int64_t Read(int64_t capacity, const Buffers& out, ParallelFor& threads) {
    Arrays arrays(view_->work_.get(), ArraysIn::kHost, view_->StreamOf(threads));
    DeviceExporter::Buffers device;
    device.keys = arrays.Out(static_cast<char*>(out.keys), capacity * view_->key_bytes_);
    device.freqs = arrays.Out(out.freqs, capacity * 4);
    device.versions = arrays.Out(out.versions, capacity * 4);
    device.scores = arrays.Out(out.scores, capacity * 8);
    device.orders = arrays.Out(out.orders, capacity * 8);
    for (ColumnOut column : out.columns) {
      column.data =
          arrays.Out(static_cast<char*>(column.data), capacity * column.width * view_->element_bytes_);
      device.columns.push_back(column);
    }
    const int64_t rows = exporter_->Next(capacity, device, view_->StreamOf(threads));
    if (rows > 0) arrays.Finish();
    return rows;
  }

  // Reads some more than the caller has room for.
  void ReadAhead(const Buffers& out, ParallelFor& threads) {
    Buffers own;
    const auto room = [](std::vector<char>* column, int64_t bytes) {
      column->resize(static_cast<size_t>(kSmallChunk * bytes));
      return column->data();
    };
    if (out.keys != nullptr) own.keys = room(&keys_, view_->key_bytes_);
    if (out.freqs != nullptr) own.freqs = reinterpret_cast<uint32_t*>(room(&freqs_, 4));
    if (out.versions != nullptr) own.versions = reinterpret_cast<uint32_t*>(room(&versions_, 4));
    if (out.scores != nullptr) own.scores = reinterpret_cast<uint64_t*>(room(&scores_, 8));
    if (out.orders != nullptr) own.orders = reinterpret_cast<uint64_t*>(room(&orders_, 8));
    columns_.resize(out.columns.size());
    for (size_t c = 0; c < out.columns.size(); ++c) {
      own.columns.push_back(out.columns[c]);
      own.columns[c].data = room(&columns_[c], out.columns[c].width * view_->element_bytes_);
    }
    held_ = Read(kSmallChunk, own, threads);
    next_held_ = 0;
  }

  void CopyHeld(int64_t rows, const Buffers& out) {
    const auto copy = [&](void* to, const std::vector<char>& from, int64_t bytes) {
      if (to == nullptr || rows == 0) return;
      std::memcpy(to, from.data() + next_held_ * bytes, static_cast<size_t>(rows * bytes));
    };
    copy(out.keys, keys_, view_->key_bytes_);
    copy(out.freqs, freqs_, 4);
    copy(out.versions, versions_, 4);
    copy(out.scores, scores_, 8);
    copy(out.orders, orders_, 8);
    for (size_t c = 0; c < out.columns.size(); ++c) {
      copy(out.columns[c].data, columns_[c], out.columns[c].width * view_->element_bytes_);
    }
    next_held_ += rows;
  }

  const View* view_;
  std::unique_ptr<DeviceExporter> exporter_;
  int64_t left_;
  // Rows that were read and not yet asked for: [next_held_, held_) of these columns.
  int64_t held_ = 0;
  int64_t next_held_ = 0;
  std::vector<char> keys_, freqs_, versions_, scores_, orders_;
  std::vector<std::vector<char>> columns_;
};

std::unique_ptr<Exporter> View::Export() const { return std::make_unique<ViewExporter>(this); }

}  // namespace

DeviceMakers& Devices() {
  static DeviceMakers makers;
  return makers;
}

bool HasDevices() { return IsBuiltWithCuda() || Devices().table != MakeCudaTable; }

std::shared_ptr<Table> ViewOf(std::shared_ptr<DeviceTable> table, std::shared_ptr<DeviceWork> work,
                              ArraysIn arrays) {
  return std::make_shared<View>(std::move(table), std::move(work), arrays);
}

DeviceTable* DeviceTableOf(Table* table) {
  const View* const view = dynamic_cast<const View*>(table);
  return view == nullptr ? nullptr : view->table();
}

std::shared_ptr<Table> ViewInPlace(const std::shared_ptr<Table>& table) {
  const View* const view = dynamic_cast<const View*>(table.get());
  return view == nullptr ? table : view->InPlace();
}

}  // namespace kvtable
