#include "snapshot/snapshot_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <functional>
#include <system_error>

#include "base/crc32c.h"
#include "memory/prefetch.h"
#include "snapshot/snapshot_level.h"

namespace kvtable {
namespace {

namespace format = snapshot_format;

constexpr uint32_t kHidden = UINT32_MAX;
constexpr int64_t kMostRows = int64_t{UINT32_MAX} - 1;
constexpr int64_t kStaged = 1 << 16;              // elements
constexpr int64_t kToDisk = int64_t{32} << 20;    // bytes that are sent on their way at once
constexpr int64_t kWaiting = int64_t{256} << 10;  // bytes of a run's rows that are written at once
constexpr int64_t kAhead = 16;
constexpr int64_t kCopied =
    1 << 16;  // rows of another table, or as few as make a mebibyte, between two rests

[[noreturn]] void ThrowSystem() { throw std::system_error(errno, std::generic_category()); }

void WriteFully(int file, const void* data, int64_t bytes, int64_t offset) {
  const auto* at = static_cast<const uint8_t*>(data);
  while (bytes > 0) {
    const ssize_t count = pwrite(file, at, static_cast<size_t>(bytes), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) ThrowSystem();
    at += count;
    offset += count;
    bytes -= count;
  }
}

void ReadFully(int file, void* data, int64_t bytes, int64_t offset) {
  auto* at = static_cast<uint8_t*>(data);
  while (bytes > 0) {
    const ssize_t count = pread(file, at, static_cast<size_t>(bytes), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count == 0) errno = EIO;
    if (count <= 0) ThrowSystem();
    at += count;
    offset += count;
    bytes -= count;
  }
}

// A hint: the sync at the end then has less to wait for.
void StartToDisk(int file, int64_t offset, int64_t bytes) {
#if defined(__linux__)
  sync_file_range(file, offset, bytes, SYNC_FILE_RANGE_WRITE);
#else
  (void)file, (void)offset, (void)bytes;
#endif
}

// Numbers that are appended to a section one by one.
template <class T>
class Stage {
 public:
  explicit Stage(SectionOutput* output) : output_(output) { staged_.reserve(kStaged); }
  void Add(T value) {
    staged_.push_back(value);
    if (staged_.size() == kStaged) Flush();
  }
  void Flush() {
    output_->Append(staged_.data(), static_cast<int64_t>(staged_.size() * sizeof(T)));
    staged_.clear();
  }

 private:
  SectionOutput* output_;
  std::vector<T> staged_;
};

}  // namespace

void SectionOutput::Append(const void* data, int64_t bytes) {
  const auto* at = static_cast<const uint8_t*>(data);
  while (bytes > 0) {
    const int64_t n = std::min(bytes, format::kCheckedBytes - in_piece_);
    crc_ = ExtendCrc32c(crc_, at, static_cast<size_t>(n));
    WriteFully(file_, at, n, offset_ + bytes_);
    if ((bytes_ + n) / kToDisk > bytes_ / kToDisk) {
      StartToDisk(file_, offset_ + bytes_ / kToDisk * kToDisk, kToDisk);
    }
    at += n;
    bytes -= n;
    bytes_ += n;
    in_piece_ += n;
    if (in_piece_ == format::kCheckedBytes) {
      checksums_.push_back(crc_);
      crc_ = 0;
      in_piece_ = 0;
    }
  }
}

std::vector<uint32_t> SectionOutput::Finish() {
  if (in_piece_ > 0) checksums_.push_back(crc_);
  in_piece_ = 0;
  return std::move(checksums_);
}

SnapshotWriter::SnapshotWriter(const std::string& path, int64_t memory)
    : path_(path), memory_(std::max<int64_t>(memory, 1 << 16)) {
  file_ = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file_ < 0) ThrowSystem();
}

SnapshotWriter::~SnapshotWriter() {
  if (file_ >= 0) close(file_);
}

int64_t SnapshotWriter::Allocate(int64_t bytes) {
  if (bytes == 0) return 0;
  const int64_t offset = end_;
  // A disk that is too small says so now, not after the hours that the rows take.
  if (fallocate(file_, 0, offset, bytes) != 0 && errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL) {
    ThrowSystem();
  }
  end_ = (offset + bytes + format::kAlignment - 1) / format::kAlignment * format::kAlignment;
  return offset;
}

void SnapshotWriter::Note(SnapshotTable::Section section, int64_t offset, SectionOutput& output) {
  records_.back().sections[section] = {static_cast<uint64_t>(output.bytes() > 0 ? offset : 0),
                                       static_cast<uint64_t>(output.bytes())};
  section_checksums_[section] = output.Finish();
}

void SnapshotWriter::BeginTable(const SnapshotTablePlan& plan) {
  if (plan.rows > kMostRows) {
    throw Error(ErrorCode::kInvalidArgument, "writing table '" + plan.name + "': got " +
                                                 std::to_string(plan.rows) + " rows, expected at most " +
                                                 std::to_string(kMostRows) +
                                                 "; cut it into several with `kvtools split`");
  }
  plan_ = plan;
  names_.push_back(plan.name);
  format::TableRecord record = {};
  record.key_type = format::NumberOf(format::kKeyTypes, plan.key_type);
  record.value_type = format::NumberOf(format::kValueTypes, plan.value_type);
  const bool quantized = plan.form != RowForm::kPlain;
  encode_ = quantized ? BestRowEncode(plan.form) : nullptr;
  record.row_form = static_cast<uint8_t>(plan.form);
  record.frequency_type = plan.frequency_type;
  record.version_type = plan.version_type;
  record.dim = static_cast<uint32_t>(plan.dim);
  record.row_bytes = static_cast<uint32_t>(quantized ? QuantizedRowBytes(plan.form, plan.dim)
                                                     : plan.dim * SizeOf(plan.value_type));
  records_.push_back(record);
  for (std::vector<uint32_t>& checksums : section_checksums_) checksums.clear();
  entries_ = Region(static_cast<size_t>(plan.rows) * sizeof(MixedKey), Pages::kHuge, "sorting keys");
  keys_added_ = 0;
  rows_added_ = 0;
}

void SnapshotWriter::AddKeys(const int64_t* keys, int64_t n) {
  if (n > plan_.rows - keys_added_) {
    throw Error(ErrorCode::kInvalidArgument, "writing table '" + plan_.name + "': more keys came than its " +
                                                 std::to_string(plan_.rows) + " rows");
  }
  auto* const entries = reinterpret_cast<MixedKey*>(entries_.data()) + keys_added_;
  for (int64_t i = 0; i < n; ++i) {
    entries[i] = {Mix64(static_cast<uint64_t>(keys[i])), static_cast<uint64_t>(keys_added_ + i)};
  }
  keys_added_ += n;
}

int64_t SnapshotWriter::SortKeys(ParallelFor& threads) {
  if (keys_added_ != plan_.rows) {
    throw Error(ErrorCode::kInvalidArgument, "writing table '" + plan_.name + "': got " +
                                                 std::to_string(keys_added_) + " keys, expected " +
                                                 std::to_string(plan_.rows));
  }
  auto* const entries = reinterpret_cast<MixedKey*>(entries_.data());
  SortMixedKeys(entries, plan_.rows, threads);
  places_ = Region(static_cast<size_t>(plan_.rows) * sizeof(uint32_t), Pages::kHuge, "placing rows");
  auto* const places = reinterpret_cast<uint32_t*>(places_.data());
  rows_ = 0;
  for (int64_t i = 0; i < plan_.rows; ++i) {
    const MixedKey entry = entries[i];
    if (i + 1 < plan_.rows && entries[i + 1].mixed == entry.mixed) {
      places[entry.row] = kHidden;
    } else {
      places[entry.row] = static_cast<uint32_t>(rows_);
      entries[rows_++].mixed = entry.mixed;
    }
  }
  format::TableRecord& record = records_.back();
  record.rows = static_cast<uint64_t>(rows_);
  record.duplicates = static_cast<uint64_t>(plan_.rows - rows_);
  record.buckets = static_cast<uint64_t>(
      std::max<int64_t>(1, (rows_ + format::kKeysPerBucket - 1) / format::kKeysPerBucket));
  record.entry_bytes = sizeof(uint32_t);

  const int64_t directory = Allocate(static_cast<int64_t>((record.buckets + 1) * record.entry_bytes));
  const int64_t keys = Allocate(rows_ * int64_t{sizeof(uint64_t)});
  SectionOutput directory_output(file_, directory), keys_output(file_, keys);
  {
    Stage<uint32_t> starts(&directory_output);
    Stage<uint64_t> mixed(&keys_output);
    uint64_t bucket = 0;  // the next one whose start is not known yet
    for (int64_t i = 0; i < rows_; ++i) {
      const uint64_t key = entries[i].mixed;
      for (const uint64_t own = format::BucketOfMixed(key, record.buckets); bucket <= own; ++bucket) {
        starts.Add(static_cast<uint32_t>(i));
      }
      mixed.Add(key);
    }
    for (; bucket <= record.buckets; ++bucket) starts.Add(static_cast<uint32_t>(rows_));
    starts.Flush();
    mixed.Flush();
  }
  Note(SnapshotTable::kDirectory, directory, directory_output);
  Note(SnapshotTable::kKeys, keys, keys_output);
  entries_ = Region();
  PlanRuns();
  return plan_.rows - rows_;
}

void SnapshotWriter::PlanRuns() {
  const format::TableRecord& record = records_.back();
  columns_.clear();
  waiting_.clear();
  int64_t width = 0;
  const auto add = [&](SnapshotTable::Section section, int64_t bytes) {
    if (bytes == 0) return;
    columns_.push_back({section, bytes, Allocate(rows_ * bytes)});
    width += bytes;
  };
  add(SnapshotTable::kRows, record.row_bytes);
  add(SnapshotTable::kFrequencies, format::kCounterBytes[record.frequency_type]);
  add(SnapshotTable::kVersions, format::kCounterBytes[record.version_type]);
  if (rows_ <= memory_ / width) {
    run_rows_ = std::max<int64_t>(1, rows_);
    for (size_t c = 0; c < columns_.size(); ++c) {
      runs_[c] = Region(static_cast<size_t>(rows_ * columns_[c].width), Pages::kHuge, "placing rows");
    }
    return;
  }
  run_rows_ = std::max<int64_t>(1, memory_ / 2 / width);
  const int64_t runs = (rows_ + run_rows_ - 1) / run_rows_;
  waiting_.resize(static_cast<size_t>(runs));
  for (Waiting& waiting : waiting_) waiting.places.reserve(static_cast<size_t>(run_rows_));
  wait_rows_ = std::max<int64_t>(1, std::min(kWaiting, memory_ / 2 / runs) / width);
}

// One row of values in the form in which it is kept.
void SnapshotWriter::StoreRow(const uint8_t* from, uint8_t* to) const {
  if (encode_ != nullptr) {
    encode_(from, plan_.dim, to);
  } else {
    std::memcpy(to, from, static_cast<size_t>(plan_.dim * SizeOf(plan_.value_type)));
  }
}

void SnapshotWriter::AddRows(int64_t first, int64_t n, const void* values, const void* frequencies,
                             const void* versions) {
  if (first < 0 || n < 0 || n > plan_.rows - first || (values == nullptr && n > 0) ||
      (frequencies == nullptr) != (plan_.frequency_type == 0) ||
      (versions == nullptr) != (plan_.version_type == 0)) {
    throw Error(ErrorCode::kInvalidArgument,
                "writing table '" + plan_.name + "': rows or columns came that it has not");
  }
  const int64_t value_bytes = plan_.dim * SizeOf(plan_.value_type);
  const auto* const rows = static_cast<const uint8_t*>(values);
  if (encode_ != nullptr) {
    const char* const name = plan_.form == RowForm::kInt4 ? "int4" : "int8";
    for (int64_t i = 0; i < n; ++i) {
      if (CanQuantize(rows + i * value_bytes, plan_.dim)) continue;
      throw Error(ErrorCode::kInvalidArgument,
                  "writing table '" + plan_.name + "' as " + name + ": row " + std::to_string(first + i) +
                      " has NaN or infinity, or numbers more than 3.3e+38 apart, which " + name +
                      " does not hold; write another type, or drop such rows");
    }
  }
  const uint32_t* const places = reinterpret_cast<const uint32_t*>(places_.data()) + first;
  const auto source = [&](const Column& column) {
    return column.section == SnapshotTable::kRows          ? rows
           : column.section == SnapshotTable::kFrequencies ? static_cast<const uint8_t*>(frequencies)
                                                           : static_cast<const uint8_t*>(versions);
  };
  if (waiting_.empty()) {
    for (size_t c = 0; c < columns_.size(); ++c) {
      const Column& column = columns_[c];
      auto* const to = reinterpret_cast<uint8_t*>(runs_[c].data());
      const uint8_t* const from = source(column);
      for (int64_t i = 0; i < n; ++i) {
        if (i + kAhead < n && places[i + kAhead] != kHidden) {
          PrefetchToWrite(to + places[i + kAhead] * column.width);
        }
        if (places[i] == kHidden) continue;
        uint8_t* const row = to + places[i] * column.width;
        if (column.section == SnapshotTable::kRows) {
          StoreRow(from + i * value_bytes, row);
        } else {
          std::memcpy(row, from + i * column.width, static_cast<size_t>(column.width));
        }
      }
    }
  } else {
    const std::lock_guard<std::mutex> hold(mutex_);
    for (int64_t i = 0; i < n; ++i) {
      if (places[i] == kHidden) continue;
      const int64_t run = places[i] / run_rows_;
      Waiting& waiting = waiting_[static_cast<size_t>(run)];
      waiting.places.push_back(static_cast<uint32_t>(places[i] % run_rows_));
      for (size_t c = 0; c < columns_.size(); ++c) {
        const Column& column = columns_[c];
        std::vector<uint8_t>& buffer = waiting.rows[c];
        buffer.resize(buffer.size() + static_cast<size_t>(column.width));
        uint8_t* const row = buffer.data() + buffer.size() - column.width;
        if (column.section == SnapshotTable::kRows) {
          StoreRow(rows + i * value_bytes, row);
        } else {
          std::memcpy(row, source(column) + i * column.width, static_cast<size_t>(column.width));
        }
      }
      if (static_cast<int64_t>(waiting.places.size()) - waiting.written >= wait_rows_) WriteWaiting(run);
    }
  }
  rows_added_ += n;
}

// Rows lie in their run in the order in which they came, until WriteRows.
void SnapshotWriter::WriteWaiting(int64_t run) {
  Waiting& waiting = waiting_[static_cast<size_t>(run)];
  for (size_t c = 0; c < columns_.size(); ++c) {
    const int64_t row = run * run_rows_ + waiting.written;
    WriteFully(file_, waiting.rows[c].data(), static_cast<int64_t>(waiting.rows[c].size()),
               columns_[c].offset + row * columns_[c].width);
    waiting.rows[c].clear();
  }
  waiting.written = static_cast<int64_t>(waiting.places.size());
}

void SnapshotWriter::WriteRows() {
  for (size_t run = 0; run < waiting_.size(); ++run) {
    WriteWaiting(static_cast<int64_t>(run));
    for (std::vector<uint8_t>& rows : waiting_[run].rows) rows = {};
  }
  for (size_t c = 0; c < columns_.size(); ++c) {
    const Column& column = columns_[c];
    SectionOutput output(file_, column.offset);
    if (waiting_.empty()) {
      output.Append(runs_[c].data(), rows_ * column.width);
      runs_[c] = Region();
    } else {
      Region placed(static_cast<size_t>(run_rows_ * column.width), Pages::kHuge, "placing rows");
      auto* const to = reinterpret_cast<uint8_t*>(placed.data());
      const int64_t step = std::max<int64_t>(1, format::kCheckedBytes / column.width);
      std::vector<uint8_t> came(static_cast<size_t>(step * column.width));
      for (size_t run = 0; run < waiting_.size(); ++run) {
        const std::vector<uint32_t>& places = waiting_[run].places;
        const auto count = static_cast<int64_t>(places.size());
        const int64_t begin = column.offset + static_cast<int64_t>(run) * run_rows_ * column.width;
        for (int64_t first = 0; first < count; first += step) {
          const int64_t n = std::min(step, count - first);
          ReadFully(file_, came.data(), n * column.width, begin + first * column.width);
          for (int64_t i = 0; i < n; ++i) {
            std::memcpy(to + places[static_cast<size_t>(first + i)] * column.width,
                        came.data() + i * column.width, static_cast<size_t>(column.width));
          }
        }
        output.Append(to, count * column.width);
      }
    }
    Note(column.section, column.offset, output);
  }
  waiting_.clear();
}

void SnapshotWriter::SetDefaultRow(const void* row) {
  const int64_t bytes = plan_.dim * SizeOf(plan_.value_type);
  const int64_t offset = Allocate(bytes);
  SectionOutput output(file_, offset);
  output.Append(row, bytes);
  Note(SnapshotTable::kDefaultRow, offset, output);
}

void SnapshotWriter::EndTable() {
  if (rows_added_ != plan_.rows) {
    throw Error(ErrorCode::kInvalidArgument, "writing table '" + plan_.name + "': got " +
                                                 std::to_string(rows_added_.load()) + " rows, expected " +
                                                 std::to_string(plan_.rows));
  }
  WriteRows();
  places_ = Region();
  for (const std::vector<uint32_t>& checksums : section_checksums_) {
    checksums_.insert(checksums_.end(), checksums.begin(), checksums.end());
  }
}

bool SnapshotWriter::CopyTable(const SnapshotTable& table, ParallelFor& threads,
                               const Snapshot::GoOn& go_on) {
  const SnapshotTable::Layout& layout = table.layout();
  const uint32_t generation = table.generation();
  if (table.verifies_on_use()) {
    for (const auto section : {SnapshotTable::kDirectory, SnapshotTable::kKeys, SnapshotTable::kRows}) {
      table.Verify(section, 0, layout.sections[section].bytes);
    }
  }
  std::shared_ptr<const SnapshotLevel> level;
  threads.Run(1, [&](int64_t) { level = MergedLevel(table); });
  const auto in_pieces = [&](int64_t step, int64_t* done, int64_t total, int64_t part,
                             const std::function<bool()>& next) {
    for (bool more = true; more;) {
      threads.Run(1, [&](int64_t) {
        int64_t n = 0;
        while (n < step && (more = next())) ++n;
        *done += n;
      });
      if (go_on && !go_on(part * total + *done, 3 * total)) return false;
    }
    return true;
  };

  SnapshotTablePlan plan;
  plan.name = layout.name;
  plan.key_type = layout.key_type;
  plan.value_type = layout.value_type;
  plan.form = layout.form;
  plan.dim = layout.dim;
  const int64_t most = layout.rows + (level == nullptr ? 0 : level->entries());
  uint64_t mixed = 0;
  const uint8_t* row = nullptr;
  int64_t rows = 0;
  {
    MergedRows counted(table, level.get());
    if (!in_pieces(kCopied * 16, &rows, most, 0, [&] { return counted.Next(&mixed, &row); })) return false;
  }
  plan.rows = 0;  // it has no keys to sort
  BeginTable(plan);
  columns_.clear();
  waiting_.clear();
  if (rows > kMostRows) {
    throw Error(ErrorCode::kInvalidArgument, "writing table '" + plan.name + "': " + std::to_string(rows) +
                                                 " rows are too many for a snapshot");
  }
  format::TableRecord& record = records_.back();
  record.rows = static_cast<uint64_t>(rows);
  record.buckets = static_cast<uint64_t>(
      std::max<int64_t>(1, (rows + format::kKeysPerBucket - 1) / format::kKeysPerBucket));
  record.entry_bytes = sizeof(uint32_t);
  {
    const int64_t directory = Allocate(static_cast<int64_t>((record.buckets + 1) * record.entry_bytes));
    const int64_t keys = Allocate(rows * int64_t{sizeof(uint64_t)});
    SectionOutput directory_output(file_, directory), keys_output(file_, keys);
    Stage<uint32_t> starts(&directory_output);
    Stage<uint64_t> all(&keys_output);
    MergedRows merged(table, level.get());
    uint64_t bucket = 0;  // the next one whose start is not known yet
    int64_t done = 0, at = 0;
    const bool whole = in_pieces(kCopied, &done, rows, 1, [&] {
      if (!merged.Next(&mixed, &row)) return false;
      for (const uint64_t own = format::BucketOfMixed(mixed, record.buckets); bucket <= own; ++bucket) {
        starts.Add(static_cast<uint32_t>(at));
      }
      all.Add(mixed);
      ++at;
      return true;
    });
    if (!whole) return false;
    for (; bucket <= record.buckets; ++bucket) starts.Add(static_cast<uint32_t>(rows));
    starts.Flush();
    all.Flush();
    Note(SnapshotTable::kDirectory, directory, directory_output);
    Note(SnapshotTable::kKeys, keys, keys_output);
  }
  {
    const int64_t offset = Allocate(rows * layout.row_bytes);
    SectionOutput output(file_, offset);
    std::vector<uint8_t> staged;
    staged.reserve(static_cast<size_t>(format::kCheckedBytes + layout.row_bytes));
    MergedRows merged(table, level.get());
    const int64_t step = std::max<int64_t>(1, std::min(kCopied, format::kCheckedBytes / layout.row_bytes));
    int64_t done = 0;
    const bool whole = in_pieces(step, &done, rows, 2, [&] {
      const bool more = merged.Next(&mixed, &row);
      if (more) staged.insert(staged.end(), row, row + layout.row_bytes);
      if (!more || static_cast<int64_t>(staged.size()) >= format::kCheckedBytes) {
        output.Append(staged.data(), static_cast<int64_t>(staged.size()));
        staged.clear();
      }
      return more;
    });
    if (!whole) return false;
    Note(SnapshotTable::kRows, offset, output);
  }
  if (const void* const missing = table.default_row()) SetDefaultRow(missing);
  table.CheckStill(generation);
  EndTable();
  return true;
}

void SnapshotWriter::Close(const std::string& json) {
  std::string names;
  const uint64_t names_offset =
      sizeof(format::DescriptionStart) + records_.size() * sizeof(format::TableRecord);
  for (size_t i = 0; i < records_.size(); ++i) {
    records_[i].name_offset = static_cast<uint32_t>(names_offset + names.size());
    records_[i].name_bytes = static_cast<uint32_t>(names_[i].size());
    names += names_[i];
  }
  const format::DescriptionStart start = {names_offset + names.size(), json.size()};
  std::string description(reinterpret_cast<const char*>(&start), sizeof(start));
  description.append(reinterpret_cast<const char*>(records_.data()),
                     records_.size() * sizeof(format::TableRecord));
  description += names;

  format::Header header = {};
  std::memcpy(header.magic, format::kMagic, sizeof(header.magic));
  header.version = format::kVersion;
  header.tables = static_cast<uint32_t>(records_.size());
  // Of what tables hold, not of where it came from: the same rows have the same fingerprint.
  format::ExtendFingerprint(header.fingerprint, description.data() + sizeof(start),
                            description.size() - sizeof(start));
  format::ExtendFingerprint(header.fingerprint, checksums_.data(), checksums_.size() * sizeof(uint32_t));
  description += json;
  header.checksums_offset = static_cast<uint64_t>(end_);
  header.checksums_bytes = checksums_.size() * sizeof(uint32_t);
  header.description_offset = (header.checksums_offset + header.checksums_bytes + 7) / 8 * 8;
  header.description_bytes = description.size();
  header.file_bytes = header.description_offset + description.size();
  const auto crc = [](const void* data, size_t size) {
    return ExtendCrc32c(0, static_cast<const uint8_t*>(data), size);
  };
  header.checksums_crc = crc(checksums_.data(), header.checksums_bytes);
  header.description_crc = crc(description.data(), description.size());
  header.header_crc = crc(&header, sizeof(header) - sizeof(header.header_crc));
  WriteFully(file_, checksums_.data(), static_cast<int64_t>(header.checksums_bytes),
             static_cast<int64_t>(header.checksums_offset));
  WriteFully(file_, description.data(), static_cast<int64_t>(description.size()),
             static_cast<int64_t>(header.description_offset));
  WriteFully(file_, &header, sizeof(header), 0);
  if (ftruncate(file_, static_cast<off_t>(header.file_bytes)) != 0 || fsync(file_) != 0) ThrowSystem();
  const int file = file_;
  file_ = -1;
  if (close(file) != 0) ThrowSystem();
}

}  // namespace kvtable
