// Reading a snapshot into memory, and comparing it with its checksums.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <initializer_list>
#include <mutex>
#include <vector>

#include "base/crc32c.h"
#include "kvtable/snapshot.h"
#include "snapshot/format.h"
#include "snapshot/snapshot_file.h"

namespace kvtable {
namespace {

namespace format = snapshot_format;

constexpr int64_t kPage = 4096;
constexpr int64_t kPopulated = int64_t{4} << 20;  // bytes that a thread asks for at once
constexpr int64_t kPopulatedPieces = 16;          // of them, between two calls of go_on
constexpr int64_t kVerified = 32;                 // mebibytes between two calls of go_on

struct Piece {
  const uint8_t* data;
  int64_t bytes;
};

// Reads a piece, and maps it: the next reader of it meets no fault. By touching it, since a fault takes the lock of
// one mapping alone: madvise(MADV_POPULATE_READ) holds that of the whole address space, and a thread of low
// priority that has it lets all others wait.
void ReadIn(const SnapshotFile& file, const Piece& piece) {
  file.AskFor(piece.data, piece.bytes);
  for (int64_t at = 0; at < piece.bytes; at += kPage) {
    static_cast<void>(*static_cast<const volatile uint8_t*>(piece.data + at));
  }
}

// What a process here may have: that of the machine, or of its control group.
int64_t MemoryLimit() {
  int64_t limit = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<int64_t>(sysconf(_SC_PAGESIZE));
  if (std::FILE* const file = std::fopen("/sys/fs/cgroup/memory.max", "re")) {
    long long most = 0;
    if (std::fscanf(file, "%lld", &most) == 1 && most > 0) limit = std::min<int64_t>(limit, most);
    std::fclose(file);
  }
  return limit;
}

void AddPieces(const uint8_t* data, int64_t bytes, std::vector<Piece>* pieces) {
  for (int64_t at = 0; at < bytes; at += kPopulated) {
    pieces->push_back({data + at, std::min(kPopulated, bytes - at)});
  }
}

}  // namespace

bool Snapshot::Populate(ParallelFor& threads, const GoOn& go_on) {
  std::vector<Piece> pieces;
  const auto add = [&](std::initializer_list<SnapshotTable::Section> sections) {
    for (const SnapshotTable& table : tables_) {
      for (const SnapshotTable::Section section : sections) {
        const SnapshotTable::Range& range = table.layout().sections[section];
        AddPieces(file_->data() + range.offset, range.bytes, &pieces);
      }
    }
  };
  add({SnapshotTable::kDirectory, SnapshotTable::kKeys, SnapshotTable::kDefaultRow});
  // More than there is memory for would push out what was read before.
  const bool all = bytes() < MemoryLimit() / 10 * 8;
  if (all) add({SnapshotTable::kRows});

  int64_t total = 0, done = 0;
  for (const Piece& piece : pieces) total += piece.bytes;
  if (go_on && !go_on(0, total)) return false;
  for (size_t first = 0; first < pieces.size(); first += kPopulatedPieces) {
    const size_t n = std::min<size_t>(kPopulatedPieces, pieces.size() - first);
    threads.Run(static_cast<int64_t>(n),
                [&](int64_t i) { ReadIn(*file_, pieces[first + static_cast<size_t>(i)]); });
    for (size_t i = first; i < first + n; ++i) done += pieces[i].bytes;
    if (go_on && !go_on(done, total)) return false;
  }
  file_->Look();
  if (all) file_->resident.store(true, std::memory_order_release);
  file_->warm.store(true, std::memory_order_release);
  return true;
}

bool SnapshotTable::Holds(Section section, int64_t place) const {
  const Range& range = layout_.sections[section];
  const int64_t bytes = std::min(format::kCheckedBytes, range.bytes - place);
  const uint32_t generation = file_->generation();  // before what is compared
  const uint8_t* const data =
      section == kDefaultRow ? default_row_.data() + place : file_->data() + range.offset + place;
  const int64_t number = layout_.first_checksum[section] + place / format::kCheckedBytes;
  if (ExtendCrc32c(0, data, static_cast<size_t>(bytes)) != file_->checksums[static_cast<size_t>(number)])
    return false;
  // Checksums are those of whoever wrote the file: what lookups rely on is looked at, too.
  if (section == kKeys && !KeysRise(place / 8, bytes / 8, reinterpret_cast<const uint64_t*>(data)))
    return false;
  file_->sound[static_cast<size_t>(number)].store(generation, std::memory_order_release);
  return true;
}

void SnapshotTable::Verify(Section section, int64_t begin, int64_t end) const {
  const Range& range = layout_.sections[section];
  const int64_t first = (begin + format::kCheckedBytes - 1) / format::kCheckedBytes * format::kCheckedBytes;
  for (int64_t place = first; place < std::min(end, range.bytes); place += format::kCheckedBytes) {
    uint32_t generation;
    bool holds;
    do {  // what was read while the file was written to says nothing
      generation = file_->generation();
      holds = Holds(section, place);
      if (!holds) file_->CheckUnchanged();
    } while (!holds && file_->generation() != generation);
    if (holds) continue;
    throw Error(
        ErrorCode::kInvalidArgument,
        "verifying '" + file_->path() + "': table '" + layout_.name + "', its " +
            format::kSectionNames[section] + " from byte " + std::to_string(place) + " on (byte " +
            std::to_string(range.offset + place) +
            " of the file) are not what was written: checksum mismatch, or keys out of order; the file is "
            "damaged, copy it again or write it again");
  }
}

bool SnapshotTable::verifies_on_use() const { return file_->verify_on_use.load(std::memory_order_acquire); }

void SnapshotTable::VerifyUsed(Section section, int64_t begin, int64_t bytes) const {
  if (bytes <= 0) return;
  const int64_t last = (begin + bytes - 1) / format::kCheckedBytes;
  for (int64_t piece = begin / format::kCheckedBytes; piece <= last; ++piece) {
    const auto number = static_cast<size_t>(layout_.first_checksum[section] + piece);
    if (file_->sound[number].load(std::memory_order_acquire) == file_->generation()) continue;
    if (section == kKeys) VerifyDirectoryOf(piece);
    const uint32_t generation = file_->generation();
    try {
      Verify(section, piece * format::kCheckedBytes, piece * format::kCheckedBytes + 1);
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kInvalidArgument) {
        const std::lock_guard<std::mutex> hold(file_->damage_mutex);
        if (file_->generation() == generation && file_->damage.empty()) file_->damage = error.what();
      }
      throw;
    }
  }
}

// Keys are compared with the directory, so what is wrong there is to be found there.
void SnapshotTable::VerifyDirectoryOf(int64_t piece) const {
  constexpr int64_t kKeysOfPiece = format::kCheckedBytes / 8;
  const auto bucket = [&](int64_t key) {
    return static_cast<int64_t>(format::BucketOfMixed(keys_[key], static_cast<uint64_t>(layout_.buckets)));
  };
  const int64_t width = layout_.wide_directory ? 8 : 4;
  const int64_t first = bucket(piece * kKeysOfPiece);
  const int64_t last = bucket(std::min((piece + 1) * kKeysOfPiece, layout_.rows) - 1);
  VerifyUsed(kDirectory, first * width, (last + 2 - first) * width);
}

void SnapshotTable::VerifyRange(Section section, int64_t width, int64_t first, int64_t n) const {
  if (verifies_on_use()) VerifyUsed(section, first * width, n * width);
}

void SnapshotTable::VerifyTaken(Section section, int64_t width, const int64_t* rows, int64_t n) const {
  if (!verifies_on_use()) return;
  for (int64_t i = 0; i < n; ++i) {
    if (rows[i] < layout_.rows) VerifyUsed(section, rows[i] * width, width);  // others are of levels
  }
}

void SnapshotTable::AskForUsed(Section section, int64_t place) const {
  const Range& range = layout_.sections[section];
  const int64_t piece = place / format::kCheckedBytes;
  const auto number = static_cast<size_t>(layout_.first_checksum[section] + piece);
  if (place >= range.bytes || file_->sound[number].load(std::memory_order_acquire) == file_->generation())
    return;
  const int64_t begin = piece * format::kCheckedBytes;
  const int64_t bytes = std::min(format::kCheckedBytes, range.bytes - begin);
  madvise(const_cast<uint8_t*>(file_->data()) + range.offset + begin, static_cast<size_t>(bytes),
          MADV_WILLNEED);
}

bool Snapshot::Verify(ParallelFor& threads, const GoOn& go_on) const {
  struct Piece {
    const SnapshotTable* table;
    SnapshotTable::Section section;
    int64_t place;
  };
  std::vector<Piece> pieces;
  pieces.reserve(file_->checksums.size());
  for (const SnapshotTable& table : tables_) {
    for (int section = 0; section < SnapshotTable::kSections; ++section) {
      for (int64_t place = 0; place < table.layout().sections[section].bytes;
           place += format::kCheckedBytes) {
        pieces.push_back({&table, static_cast<SnapshotTable::Section>(section), place});
      }
    }
  }
  const auto count = static_cast<int64_t>(pieces.size());
  // Compares them in this generation; false where it ends before, or `go_on` says no.
  const auto compare = [&](uint32_t generation) {
    for (int64_t first = 0; first < count; first += kVerified) {
      const int64_t n = std::min(kVerified, count - first);
      std::atomic<int64_t> bad{count};  // the first one
      threads.Run(n, [&](int64_t i) {
        const Piece& piece = pieces[static_cast<size_t>(first + i)];
        if (piece.table->Holds(piece.section, piece.place)) return;
        int64_t before = bad.load();
        while (first + i < before && !bad.compare_exchange_weak(before, first + i)) {
        }
      });
      if (bad.load() < count) {
        const Piece& piece = pieces[static_cast<size_t>(bad.load())];
        try {
          file_->Look();
          piece.table->Verify(piece.section, piece.place, piece.place + 1);
        } catch (const Error&) {
          if (file_->generation() == generation) throw;
        }
        if (file_->generation() != generation) return false;  // which may be why
      }
      {
        const std::lock_guard<std::mutex> hold(file_->damage_mutex);
        if (!file_->damage.empty()) throw Error(ErrorCode::kInvalidArgument, file_->damage);
      }
      if (go_on && !go_on((first + n) * format::kCheckedBytes, count * format::kCheckedBytes)) return false;
    }
    file_->Look();
    return true;
  };
  for (;;) {
    file_->Look();
    const uint32_t generation = file_->generation();
    file_->AwaitQuiet();
    const bool whole = compare(generation);
    if (whole && file_->EndVerifyOnUse(generation)) return true;
    if (go_on) return false;
  }
}

}  // namespace kvtable
