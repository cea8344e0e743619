#include "spill/row_cache.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "base/crc32c.h"
#include "kvtable/types.h"
#include "memory/copy_rows.h"
#include "memory/prefetch.h"

namespace kvtable {
namespace {

constexpr size_t kMostWritten = size_t{256} << 10;  // bytes by one call
constexpr size_t kAlign = 16;
constexpr size_t kRowsAhead = 12;

}  // namespace

RowCache::RowCache(std::shared_ptr<SpillFile> file, int64_t row_bytes, int64_t memory, bool huge_pages)
    : file_(std::move(file)),
      memory_(memory),
      pages_(huge_pages ? Pages::kHuge : Pages::kOrdinary),
      row_bytes_(row_bytes) {
  most_frames_ = limit_ = FramesFor(row_bytes);
  format_ = std::make_shared<Format>();
  format_->row_bytes = row_bytes;
}

RowCache::~RowCache() = default;

uint32_t RowCache::FramesFor(int64_t row_bytes) const {
  const int64_t each = BytesInMemory(row_bytes);
  const int64_t frames = memory_ / each;
  if (frames < kLeastRows) file_->ThrowTooSmall(kLeastRows * each);
  return static_cast<uint32_t>(std::min<int64_t>(frames, int64_t{kInFile} - 1));
}

uint32_t RowCache::Checksum(uint32_t slot, uint32_t row, const char* bytes, int64_t row_bytes) {
  // Another for each slot of a row, and for each row of a slot.
  const uint32_t begin = slot * 0x9E3779B1u ^ row * 0x85EBCA6Bu;
  return ExtendCrc32c(begin, reinterpret_cast<const uint8_t*>(bytes), static_cast<size_t>(row_bytes));
}

SpillFile::Piece RowCache::RecordAt(uint32_t slot, char* to) const {
  const Segment& segment = SegmentOf(slot);
  const size_t record = RecordBytes(segment.format->row_bytes);
  return {segment.offset + PlaceOf(slot) * record, to, record};
}

bool RowCache::IsWhole(uint32_t slot, uint32_t row, const char* record) const {
  RecordHead head;
  std::memcpy(&head, record, sizeof(head));
  return head.row == row &&
         head.checksum == Checksum(slot, head.row, record + sizeof(head), SegmentOf(slot).format->row_bytes);
}

void RowCache::CopyRow(const Segment& segment, const char* record, char* to) const {
  const char* row = record + sizeof(RecordHead);
  const Format* format = segment.format.get();
  std::vector<char> from, into;
  for (; format->next != nullptr; format = format->next.get()) {
    into.resize(static_cast<size_t>(format->next->row_bytes));
    format->convert(row, into.data(), 1);
    std::swap(from, into);
    row = from.data();
  }
  std::memcpy(to, row, static_cast<size_t>(row_bytes_));
}

// ---- Frames

void RowCache::MakeRoom(size_t count) {
  if (count > FreeFrames()) Evict(count - FreeFrames());
  if (data_.data() == nullptr) {
    data_ =
        Region(static_cast<size_t>(most_frames_) * static_cast<size_t>(row_bytes_), pages_, "a table's rows");
  }
  const size_t frames = std::min<size_t>(frames_.size() + count, most_frames_);
  if (frames > frames_.capacity()) frames_.reserve(std::min<size_t>(2 * frames, most_frames_));
  if (frames_.capacity() > trial_.size()) {
    std::vector<uint32_t> larger(frames_.capacity());
    for (size_t i = 0; i < trial_count_; ++i) larger[i] = trial_[(trial_begin_ + i) % trial_.size()];
    trial_ = std::move(larger);
    trial_begin_ = 0;
  }
}

uint32_t RowCache::TakeFrame(uint32_t row, uint32_t slot, bool on_trial) noexcept {
  ++in_use_;
  uint32_t at = free_frame_;
  if (at == kNone) {
    at = static_cast<uint32_t>(frames_.size());
    frames_.emplace_back();
  } else {
    free_frame_ = frames_[at].slot;
  }
  Frame& frame = frames_[at];
  frame.row = row;
  frame.slot = slot;
  frame.batch = batch_;
  frame.touches = 0;
  if (on_trial && !frame.on_trial) PutOnTrial(at);
  where_[row] = at;
  return at;
}

void RowCache::LeaveFrame(uint32_t at) noexcept {
  Frame& frame = frames_[at];
  frame.row = kNone;
  frame.slot = free_frame_;
  free_frame_ = at;
  --in_use_;
}

bool RowCache::WentLately(uint32_t slot) const {
  const Segment& segment = SegmentOf(slot);
  const uint32_t place = PlaceOf(slot);
  return place >= segment.copied && evicted_ - (segment.first + (place - segment.copied)) <= limit_ / 2;
}

void RowCache::PutOnTrial(uint32_t frame) noexcept {
  trial_[(trial_begin_ + trial_count_) % trial_.size()] = frame;
  ++trial_count_;
  frames_[frame].on_trial = true;
}

uint32_t RowCache::OffTrial() noexcept {
  const uint32_t frame = trial_[trial_begin_];
  trial_begin_ = (trial_begin_ + 1) % trial_.size();
  --trial_count_;
  frames_[frame].on_trial = false;
  return frame;
}

void RowCache::Evict(size_t count) {
  // Some more at once, so that they are written together.
  const size_t before = in_use_;
  const size_t wanted = std::max<size_t>(count, std::clamp<size_t>(limit_ / 64, 1, 1024));
  std::vector<uint32_t> written;
  size_t taken = 0;
  const auto take = [&](uint32_t at) {
    Frame& frame = frames_[at];
    frame.batch = batch_;  // so that it is not taken twice
    ++taken;
    if (frame.slot == kNone) {
      written.push_back(at);
      return;
    }
    where_[frame.row] = kInFile | frame.slot;  // the file has it as it is
    LeaveFrame(at);
  };
  // Of those on trial that came first, as many as are more than `kept`, unless they were touched often enough.
  const auto take_from_trial = [&](size_t kept, uint8_t passes) {
    for (size_t left = trial_count_; left > 0 && trial_count_ > kept && taken < wanted; --left) {
      const uint32_t at = OffTrial();
      Frame& frame = frames_[at];
      if (frame.row == kNone) continue;
      if (frame.batch == batch_) {
        PutOnTrial(at);
      } else if (frame.touches >= passes) {
        frame.touches = 0;
      } else {
        take(at);
      }
    }
  };
  take_from_trial(limit_ / kTrialPart, kPasses);
  const size_t most_steps = frames_.size() * (kMostTouches + 2);
  for (size_t step = 0; step < most_steps && taken < wanted; ++step) {
    if (hand_ >= frames_.size()) hand_ = 0;
    Frame& frame = frames_[hand_];
    const uint32_t at = hand_++;
    if (frame.row == kNone || frame.on_trial || frame.batch == batch_) continue;
    if (frame.touches > 0) {
      --frame.touches;
    } else {
      take(at);
    }
  }
  take_from_trial(0, UINT8_MAX);
  try {
    WriteOut(written);
  } catch (const Error&) {
    if (before - in_use_ < count) throw;
  }
  if (before - in_use_ < count)
    throw std::logic_error("More rows of one batch than a shard's memory has room for.");
}

void RowCache::WriteOut(const std::vector<uint32_t>& frames) {
  const size_t record = RecordBytes(row_bytes_);
  Scratch<uint64_t> scratch(std::min(frames.size() * record, kMostWritten + record) / sizeof(uint64_t) + 1);
  char* const buffer = reinterpret_cast<char*>(scratch.data());
  for (size_t done = 0; done < frames.size();) {
    if (open_ == kNone || segments_[open_].used == segments_[open_].slots) OpenSegment();
    Segment& segment = segments_[open_];
    const size_t count = std::min({frames.size() - done, size_t{segment.slots - segment.used},
                                   std::max<size_t>(1, kMostWritten / record)});
    for (size_t i = 0; i < count; ++i) {
      if (i + kRowsAhead < count)
        PrefetchRow<kAnyBytes>(FrameBytes(frames[done + i + kRowsAhead]), row_bytes_);
      const uint32_t row = frames_[frames[done + i]].row;
      PrefetchToWrite(&where_[row]);
      const char* const bytes = FrameBytes(frames[done + i]);
      const uint32_t slot = SlotNumber(open_, segment.used + static_cast<uint32_t>(i));
      const RecordHead head = {row, Checksum(slot, row, bytes, row_bytes_)};
      std::memcpy(buffer + i * record, &head, sizeof(head));
      std::memcpy(buffer + i * record + sizeof(head), bytes, static_cast<size_t>(row_bytes_));
    }
    file_->Write(segment.offset + segment.used * record, buffer, count * record);
    for (size_t i = 0; i < count; ++i) {
      where_[frames_[frames[done + i]].row] =
          kInFile | SlotNumber(open_, segment.used + static_cast<uint32_t>(i));
      LeaveFrame(frames[done + i]);
    }
    if (segment.used == segment.copied) segment.first = evicted_;
    evicted_ += count;
    segment.used += static_cast<uint32_t>(count);
    segment.live += static_cast<uint32_t>(count);
    file_->rows_written.fetch_add(static_cast<int64_t>(count), std::memory_order_relaxed);
    done += count;
  }
}

void RowCache::BringIn(const uint32_t* rows, size_t count, size_t more) {
  ++batch_;
  constexpr size_t kAhead = 16;
  std::vector<uint64_t> away;  // slots and rows, so that they are read in the order of the file
  for (size_t i = 0; i < std::min(2 * kAhead, count); ++i) __builtin_prefetch(&where_[rows[i]]);
  for (size_t i = 0; i < count; ++i) {
    if (i + 2 * kAhead < count) __builtin_prefetch(&where_[rows[i + 2 * kAhead]]);
    if (i + kAhead < count && IsHere(rows[i + kAhead])) PrefetchToWrite(&frames_[where_[rows[i + kAhead]]]);
    if (IsHere(rows[i])) {
      Touch(&frames_[where_[rows[i]]]);
    } else {
      away.push_back(uint64_t{SlotOf(rows[i])} << 32 | rows[i]);
    }
  }
  if (!away.empty()) {
    std::sort(away.begin(), away.end());
    away.erase(std::unique(away.begin(), away.end()), away.end());
  }
  MakeRoom(away.size() + more);
  if (!away.empty()) Fetch(away);
}

void RowCache::Fetch(const std::vector<uint64_t>& away) {
  FileReads reads;
  // Where they are now: to make room may have moved them.
  for (const uint64_t from : away) reads.Add(*this, static_cast<uint32_t>(from));
  reads.Run();
  for (size_t i = 0; i < away.size(); ++i) {
    const uint32_t row = static_cast<uint32_t>(away[i]);
    const uint32_t slot = SlotOf(row);
    const bool on_trial = !WentLately(slot) && ++came_ % kUntried != 0;
    const uint32_t frame = TakeFrame(row, slot, on_trial);
    std::memcpy(FrameBytes(frame), reads.Row(i), static_cast<size_t>(row_bytes_));
  }
}

void RowCache::PrepareAllocate(uint32_t row) {
  if (row >= where_.size()) {
    if (row >= where_.capacity())
      where_.reserve(std::max<size_t>(row + 1, where_.capacity() + where_.capacity() / 4));
    where_.resize(size_t{row} + 1, kNowhere);
  }
  MakeRoom(1);
}

void RowCache::Allocate(uint32_t row) noexcept { TakeFrame(row, kNone, true); }

void RowCache::Free(uint32_t row) noexcept {
  if (!IsHere(row)) {
    Drop(SlotOf(row));
  } else {
    BeforeWrite(row);
    LeaveFrame(where_[row]);
  }
  where_[row] = kNowhere;
}

void RowCache::Clear() noexcept {
  for (uint32_t s = 0; s < segments_.size(); ++s) LetGo(s);
  segments_.clear();
  open_ = spare_ = kNone;
  data_ = Region();
  where_ = {};
  frames_ = {};
  free_frame_ = kNone;
  trial_ = {};
  trial_begin_ = trial_count_ = 0;
  in_use_ = 0;
  hand_ = 0;
}

// ---- Segments

uint32_t RowCache::SegmentSlots() const {
  const size_t of_size = kSegmentBytes / RecordBytes(row_bytes_);
  // Those of a small cache are small.
  return static_cast<uint32_t>(
      std::clamp<size_t>(std::min<size_t>(of_size, most_frames_ / 4), 4, size_t{1} << kSlotBits));
}

uint32_t RowCache::NewSegment() {
  uint32_t number = 0;
  while (number < segments_.size() && segments_[number].bytes != 0) ++number;
  if (number == kMostSegments) {
    throw Error(
        ErrorCode::kResourceExhausted,
        "One shard of a table has as many rows in its spill file as it can. Use more shards (up to 64), or "
        "partition the table.");
  }
  if (number == segments_.size()) segments_.emplace_back();
  const size_t record = RecordBytes(row_bytes_);
  const size_t bytes = (SegmentSlots() * record + kPage - 1) / kPage * kPage;
  const uint32_t slots = static_cast<uint32_t>(std::min<size_t>(bytes / record, size_t{1} << kSlotBits));
  const uint64_t offset = file_->Allocate(bytes);
  Segment& made = segments_[number];
  made.offset = offset;
  made.bytes = bytes;
  made.slots = slots;
  made.format = format_;
  return number;
}

void RowCache::LetGo(uint32_t segment) noexcept {
  Segment& gone = segments_[segment];
  if (gone.bytes != 0) file_->Release(gone.offset, gone.bytes);
  gone = Segment();
}

// Makes `open_` a segment that has room.
void RowCache::OpenSegment() {
  if (spare_ == kNone) spare_ = NewSegment();
  size_t slots = 0;
  size_t live = 0;
  uint32_t least = kNone;
  uint32_t dead = kNone;
  for (uint32_t s = 0; s < segments_.size(); ++s) {
    Segment& segment = segments_[s];
    if (segment.bytes == 0 || s == spare_) continue;
    if (segment.live == 0) {  // nobody needs it any more
      if (s == open_) open_ = kNone;
      // But for one, for on a full disk what was let go may be another's before it is asked for again.
      if (dead == kNone && segment.format == format_ && segment.bytes == segments_[spare_].bytes) {
        dead = s;
      } else {
        LetGo(s);
      }
      continue;
    }
    slots += segment.slots;
    live += segment.live;
    if (segment.live >= segments_[spare_].slots || segment.damaged) continue;
    if (least == kNone || segment.live < segments_[least].live) least = s;
  }
  if (least != kNone && slots >= 2 * live + 4 * segments_[spare_].slots && Clean(least)) {
    if (dead != kNone) LetGo(dead);
    return;
  }
  if (dead != kNone) {
    segments_[dead].used = segments_[dead].copied = 0;
    segments_[dead].damaged = false;
    open_ = dead;
    return;
  }
  try {
    open_ = NewSegment();
  } catch (const Error&) {
    // The disk is full: the space of dead rows is left. A segment that is partly read, or has but few, is no help.
    if (least == kNone || !Clean(least)) throw;
  }
}

// Copies the rows of a segment, fewer than one holds, to the spare one, which becomes the open one; false where they
// cannot be read. Throws where they cannot be written; nothing has changed then.
bool RowCache::Clean(uint32_t number) {
  const Segment& from = segments_[number];
  Segment& to = segments_[spare_];
  const size_t record = RecordBytes(from.format->row_bytes);
  const size_t bytes = from.used * record;
  const char* records = file_->InMemory(from.offset, bytes);
  Scratch<uint64_t> read(records == nullptr ? bytes / sizeof(uint64_t) + 1 : 0);
  std::vector<std::pair<uint32_t, uint32_t>> moved;  // row, place
  const auto damaged = [&] {
    segments_[number].damaged = true;
    return false;
  };
  if (records == nullptr) {
    const SpillFile::Piece piece = {from.offset, reinterpret_cast<char*>(read.data()), bytes};
    try {
      file_->Read(&piece, 1);
    } catch (const Error&) {
      return damaged();
    }
    records = piece.to;
  }
  for (uint32_t place = 0; place < from.used; ++place) {
    const uint32_t slot = SlotNumber(number, place);
    uint32_t row;
    std::memcpy(&row, records + place * record, sizeof(row));
    if (row >= where_.size() || where_[row] == kNowhere) continue;
    const uint32_t now = IsHere(row) ? frames_[where_[row]].slot : SlotOf(row);
    if (now != slot) continue;
    if (!IsWhole(slot, row, records + place * record)) return damaged();
    moved.emplace_back(row, place);
  }
  if (moved.size() != from.live) return damaged();
  const size_t new_record = RecordBytes(row_bytes_);
  Scratch<uint64_t> written(moved.size() * new_record / sizeof(uint64_t) + 1);
  char* const copied = reinterpret_cast<char*>(written.data());
  for (size_t i = 0; i < moved.size(); ++i) {
    char* const at = copied + i * new_record;
    CopyRow(from, records + moved[i].second * record, at + sizeof(RecordHead));
    const uint32_t slot = SlotNumber(spare_, static_cast<uint32_t>(i));
    const RecordHead head = {moved[i].first,
                             Checksum(slot, moved[i].first, at + sizeof(RecordHead), row_bytes_)};
    std::memcpy(at, &head, sizeof(head));
  }
  file_->Write(to.offset, copied, moved.size() * new_record);
  for (size_t i = 0; i < moved.size(); ++i) {
    const uint32_t row = moved[i].first;
    const uint32_t slot = SlotNumber(spare_, static_cast<uint32_t>(i));
    if (IsHere(row)) {
      frames_[where_[row]].slot = slot;
    } else {
      where_[row] = kInFile | slot;
    }
  }
  to.used = to.live = to.copied = static_cast<uint32_t>(moved.size());
  open_ = spare_;
  spare_ = kNone;
  Segment& emptied = segments_[number];
  emptied.used = emptied.live = emptied.copied = 0;
  if (emptied.format == format_ && emptied.bytes == segments_[open_].bytes) {
    spare_ = number;
  } else {
    LetGo(number);
  }
  return true;
}

// ---- Another layout

void RowCache::PrepareRelayout(int64_t row_bytes, const ConvertRows& convert) {
  Next next;
  next.most_frames = FramesFor(row_bytes);
  next.format = std::make_shared<Format>();
  next.format->row_bytes = row_bytes;
  next.convert = convert;
  next.data = Region(static_cast<size_t>(next.most_frames) * static_cast<size_t>(row_bytes), pages_,
                     "a table's rows");
  const uint32_t limit = std::min(most_frames_, next.most_frames);
  next.frames.reserve(limit);
  ++batch_;
  limit_ = limit;
  try {
    if (in_use_ > limit_) Evict(in_use_ - limit_);
  } catch (...) {
    limit_ = most_frames_;
    throw;
  }
  next_ = std::move(next);
}

void RowCache::CancelRelayout() noexcept {
  next_.reset();
  limit_ = most_frames_;
}

void RowCache::Relayout() noexcept {
  Next& next = *next_;
  for (const Frame& frame : frames_) {
    if (frame.row == kNone) continue;
    const uint32_t at = static_cast<uint32_t>(next.frames.size());
    next.convert(Row(frame.row), next.data.data() + at * static_cast<size_t>(next.format->row_bytes), 1);
    next.frames.push_back(frame);
    next.frames.back().on_trial = false;
    where_[frame.row] = at;
  }
  frames_ = std::move(next.frames);
  free_frame_ = kNone;
  trial_begin_ = trial_count_ = 0;
  hand_ = 0;
  data_ = std::move(next.data);
  row_bytes_ = next.format->row_bytes;
  format_->convert = std::move(next.convert);
  format_->next = next.format;
  format_ = std::move(next.format);
  most_frames_ = limit_ = next.most_frames;
  next_.reset();
  open_ = kNone;
  if (spare_ != kNone) LetGo(spare_);
  spare_ = kNone;
}

int64_t RowCache::ColumnBytes() const {
  return static_cast<int64_t>(where_.capacity() * sizeof(uint32_t) + frames_.capacity() * sizeof(Frame) +
                              trial_.capacity() * sizeof(uint32_t) + segments_.capacity() * sizeof(Segment));
}

// ---- Reads

void FileReads::Clear() {
  reads_.clear();
  pieces_.clear();
  bytes_ = 0;
}

size_t FileReads::Add(const RowCache& cache, uint32_t row) {
  const uint32_t slot = cache.SlotOf(row);
  // Room for the record, and for the row in today's layout.
  const int64_t bytes = std::max(cache.row_bytes_, cache.SegmentOf(slot).format->row_bytes);
  reads_.push_back({&cache, row, slot, bytes_});
  bytes_ += (RowCache::RecordBytes(bytes) + kAlign - 1) / kAlign * kAlign;
  return reads_.size() - 1;
}

void FileReads::Run() {
  if (reads_.empty()) return;
  buffer_.reset();  // another may have the same memory
  buffer_.emplace(bytes_ / sizeof(uint64_t));
  for (const Read& read : reads_) pieces_.push_back(read.cache->RecordAt(read.slot, At(read)));
  const SpillFile& file = *reads_[0].cache->file_;  // all shards of a table have one
  file.Read(pieces_.data(), pieces_.size());
  file.rows_read.fetch_add(static_cast<int64_t>(reads_.size()), std::memory_order_relaxed);
  std::vector<char> today;
  for (const Read& read : reads_) {
    char* const record = At(read);
    if (!read.cache->IsWhole(read.slot, read.row, record)) file.ThrowDamaged();
    const RowCache::Segment& segment = read.cache->SegmentOf(read.slot);
    if (segment.format->next == nullptr) continue;
    today.resize(static_cast<size_t>(read.cache->row_bytes_));
    read.cache->CopyRow(segment, record, today.data());
    std::memcpy(record + sizeof(RowCache::RecordHead), today.data(), today.size());
  }
}

}  // namespace kvtable
