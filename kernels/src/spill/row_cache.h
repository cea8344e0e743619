// The rows of one shard of a table that outgrows its memory: those in use in memory, the others in a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "memory/huge_pages.h"
#include "memory/prefetch.h"
#include "memory/scratch.h"
#include "spill/spill_file.h"

namespace kvtable {

// Fills `rows` consecutive rows of a new layout.
using ConvertRows = std::function<void(const char* old_rows, char* new_rows, uint32_t rows)>;

// A row keeps its number for life; where its bytes are is one word per row: a frame in memory, or a slot in the file.
//
// Memory is frames of one row each, as many as fit. Who writes rows brings them in first, and may evict others for that. A row
// that comes is on trial: it goes again when a tenth of the frames have come after it, unless it was touched twice until then
// (once by the update that follows the lookup for which it came). Where it was, or had gone but lately, it stays until a clock
// hand, which goes around the frames, finds it not touched since it was there last; one that was touched often after as many
// rounds, up to seven. (S3-FIFO: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. Its list of rows
// that went is the file.) One row in sixteen is not tried, so that what nobody wants any more goes even where no row passes.
// Rows of the batch at hand are never taken. Who only reads takes a row from the file where it is, and changes nothing.
//
// The file is a log of segments: rows that are evicted are written one behind the other to the open one, whatever they had
// before is dead, and a segment that has few rows left is copied together when space is to be had: the file takes about
// twice the space of the rows in it. One segment is kept empty for that, so it works on a full disk, too. A row that was brought in keeps
// its slot until it is written, so one that was only read goes without being written. Beside a row stands a checksum of it
// and of its slot.
//
// A change of slots converts the rows in memory; those in the file stay as they are, in segments that know how their rows
// become today's, and are converted when they are read.
//
// Guarded by the shard's lock: const functions need it shared, others exclusively. Whatever can fail, fails before
// anything has changed.
class RowCache {
 public:
  // `memory`: bytes for rows in memory. Throws Error(kInvalidArgument) where they are fewer than kLeastRows.
  RowCache(std::shared_ptr<SpillFile> file, int64_t row_bytes, int64_t memory, bool huge_pages);
  ~RowCache();
  RowCache(const RowCache&) = delete;
  RowCache& operator=(const RowCache&) = delete;

  bool IsHere(uint32_t row) const { return where_[row] < kInFile; }
  // The bytes of a row that is here.
  char* Row(uint32_t row) const { return FrameBytes(where_[row]); }
  void Prefetch(uint32_t row) const { __builtin_prefetch(where_.data() + row); }
  void PrefetchFrame(uint32_t row) const {
    if (IsHere(row)) PrefetchToWrite(frames_.data() + where_[row]);
  }
  // Of one that is not.
  uint32_t SlotOf(uint32_t row) const { return where_[row] & ~kInFile; }

  // ---- Rows that are to be written

  // The most rows that one call of BringIn may have and make room for.
  uint32_t most_rows() const { return limit_ / 2; }
  // Has these rows (which exist) here, and frames for `more` new ones; until the next call, none of them is evicted.
  // Throws what the file throws.
  void BringIn(const uint32_t* rows, size_t count, size_t more);
  // Makes sure that the next Allocate of this row cannot fail.
  void PrepareAllocate(uint32_t row);
  void Allocate(uint32_t row) noexcept;
  // Before the bytes of a row that is here change.
  void BeforeWrite(uint32_t row) noexcept {
    Frame& frame = frames_[where_[row]];
    if (frame.slot != kNone) Drop(frame.slot);
    frame.slot = kNone;
  }
  void Free(uint32_t row) noexcept;
  void Clear() noexcept;

  int64_t row_bytes() const { return row_bytes_; }

  // ---- Another size of rows, in two steps, as RowStore has it

  void PrepareRelayout(int64_t row_bytes, const ConvertRows& convert);
  void Relayout() noexcept;
  void CancelRelayout() noexcept;

  int64_t here() const { return in_use_; }  // rows in memory
  int64_t TouchedRowBytes() const {
    return static_cast<int64_t>(data_.TouchedBytes(frames_.size() * static_cast<size_t>(row_bytes_)));
  }
  int64_t ColumnBytes() const;

  // The least that a row in memory takes, and the fewest that there is to be memory for.
  static int64_t BytesInMemory(int64_t row_bytes) {
    return row_bytes + static_cast<int64_t>(sizeof(Frame) + sizeof(uint32_t));
  }
  static constexpr int64_t kLeastRows = 16;

 private:
  friend class FileReads;
  static constexpr uint32_t kInFile = 1u << 31;
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr uint32_t kNowhere = kNone;  // of a row that does not exist
  static constexpr int kSlotBits = 12;         // of a slot's place in its segment
  static constexpr uint32_t kMostSegments = (kInFile >> kSlotBits) - 1;
  static constexpr size_t kSegmentBytes = size_t{1} << 20;
  static constexpr uint8_t kMostTouches = 7;
  static constexpr uint32_t kTrialPart = 10;  // of the frames: one in so many
  // Touches on trial: the update after the lookup that brought it in is one. And one row in so many that come is not tried.
  static constexpr uint8_t kPasses = 2;
  static constexpr uint32_t kUntried = 16;

  struct Frame {
    uint32_t row = kNone;   // kNone: free
    uint32_t slot = kNone;  // in the file that holds the same bytes; of a free one, the next free one
    uint32_t batch = 0;     // that touched it last
    uint8_t touches = 0;
    bool on_trial = false;  // listed in trial_
  };
  // How rows lie in a segment, and how they become those of the layout that followed.
  struct Format {
    int64_t row_bytes;
    ConvertRows convert;
    std::shared_ptr<const Format> next;  // null: today's
  };
  struct Segment {
    uint64_t offset = 0;
    size_t bytes = 0;  // 0: there is no such segment
    uint32_t slots = 0;
    uint32_t used = 0;     // slots that were written
    uint32_t live = 0;     // that hold a row
    uint32_t copied = 0;   // slots, the first ones, whose rows are from another segment
    uint64_t first = 0;    // how many rows had been evicted before the one in the slot after those
    bool damaged = false;  // a row in it did not come back: it stays where it is
    std::shared_ptr<Format> format;
  };
  struct RecordHead {
    uint32_t row;
    uint32_t checksum;
  };
  struct Next {
    std::shared_ptr<Format> format;
    ConvertRows convert;
    uint32_t most_frames;
    Region data;
    std::vector<Frame> frames;
  };

  static size_t RecordBytes(int64_t row_bytes) { return sizeof(RecordHead) + static_cast<size_t>(row_bytes); }
  static uint32_t Checksum(uint32_t slot, uint32_t row, const char* bytes, int64_t row_bytes);
  static uint32_t SlotNumber(uint32_t segment, uint32_t place) { return segment << kSlotBits | place; }
  static uint32_t PlaceOf(uint32_t slot) { return slot & ((1u << kSlotBits) - 1); }
  const Segment& SegmentOf(uint32_t slot) const { return segments_[slot >> kSlotBits]; }
  SpillFile::Piece RecordAt(uint32_t slot, char* to) const;
  // Whether a record that was read is the one of a row that was written there.
  bool IsWhole(uint32_t slot, uint32_t row, const char* record) const;
  // The row of a record, in today's layout.
  void CopyRow(const Segment& segment, const char* record, char* to) const;

  void Drop(uint32_t slot) noexcept { --segments_[slot >> kSlotBits].live; }
  char* FrameBytes(uint32_t frame) const { return data_.data() + frame * static_cast<size_t>(row_bytes_); }
  uint32_t FramesFor(int64_t row_bytes) const;
  size_t FreeFrames() const { return limit_ > in_use_ ? limit_ - in_use_ : 0; }
  void Touch(Frame* frame) const noexcept {
    if (frame->batch != batch_ && frame->touches < kMostTouches) ++frame->touches;
    frame->batch = batch_;
  }
  // Makes sure that `count` calls of TakeFrame cannot fail.
  void MakeRoom(size_t count);
  uint32_t TakeFrame(uint32_t row, uint32_t slot, bool on_trial) noexcept;
  void LeaveFrame(uint32_t at) noexcept;
  // Of a row in the file: whether half as many rows as memory has or fewer were written there after it. Not known of those
  // that were copied since, and by when it was written of those that went without being written.
  bool WentLately(uint32_t slot) const;
  void PutOnTrial(uint32_t frame) noexcept;
  uint32_t OffTrial() noexcept;  // the one that is on it for longest
  void Evict(size_t count);
  void WriteOut(const std::vector<uint32_t>& frames);
  void Fetch(const std::vector<uint64_t>& away);  // slot << 32 | row

  uint32_t SegmentSlots() const;
  uint32_t NewSegment();
  void LetGo(uint32_t segment) noexcept;
  void OpenSegment();
  bool Clean(uint32_t segment);

  const std::shared_ptr<SpillFile> file_;
  const int64_t memory_;
  const Pages pages_;
  int64_t row_bytes_;
  uint32_t most_frames_;
  uint32_t limit_;  // of frames in use: less while a layout of fewer is coming
  uint32_t in_use_ = 0;
  uint32_t batch_ = 1;
  uint32_t hand_ = 0;
  Region data_;
  std::vector<uint32_t> where_;  // of each row number: frame, kInFile | slot, or kNowhere
  std::vector<Frame> frames_;    // those used so far
  uint32_t free_frame_ = kNone;
  uint64_t evicted_ = 0;  // rows, so far, that had to be written for it
  uint32_t came_ = 0;     // rows, so far, from the file, but for those that had gone lately
  // Frames whose rows came last, in that order, as a ring; it has places for all. (A frame that was left keeps its place,
  // and the next row in it has that.)
  std::vector<uint32_t> trial_;
  size_t trial_begin_ = 0;
  size_t trial_count_ = 0;
  std::vector<Segment> segments_;
  std::shared_ptr<Format> format_;
  uint32_t open_ = kNone;   // segment that is written to
  uint32_t spare_ = kNone;  // segment that is empty
  std::optional<Next> next_;
};

// Reads of rows in files, made all at once. The rows' shards are locked, at least shared, until Run returns.
class FileReads {
 public:
  void Clear();
  // A row that is not in memory. Returns its number here.
  size_t Add(const RowCache& cache, uint32_t row);
  size_t size() const { return reads_.size(); }
  // Throws Error(kFailedPrecondition).
  void Run();
  // Until Clear; aligned to 8 bytes.
  const char* Row(size_t i) const { return At(reads_[i]) + sizeof(RowCache::RecordHead); }

 private:
  struct Read {
    const RowCache* cache;
    uint32_t row;
    uint32_t slot;
    size_t at;  // in the buffer; the row has its place behind the head
  };
  char* At(const Read& read) const { return reinterpret_cast<char*>(buffer_->data()) + read.at; }

  std::vector<Read> reads_;
  std::vector<SpillFile::Piece> pieces_;
  mutable std::optional<Scratch<uint64_t>> buffer_;
  size_t bytes_ = 0;
};

}  // namespace kvtable
