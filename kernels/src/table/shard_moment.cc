#include "table/shard_moment.h"

#include <algorithm>

namespace kvtable {
namespace {

constexpr int64_t kBlockBytes = int64_t{64} << 10;

}  // namespace

void AsideMemory::Shrink(int64_t bytes) {
  used_.fetch_sub(bytes, std::memory_order_relaxed);
  NoteProgress();
}

void AsideMemory::NoteProgress() {
  std::lock_guard<std::mutex> hold(mutex_);
  progress_ = std::chrono::steady_clock::now();
  changed_.notify_all();
}

bool AsideMemory::IsStuck() const {
  std::lock_guard<std::mutex> hold(mutex_);
  return std::chrono::steady_clock::now() - progress_ > patience_;
}

bool AsideMemory::AwaitRoom() {
  std::unique_lock<std::mutex> hold(mutex_);
  if (!IsFull()) return true;
  // In short turns: an export may be over without a word to those who share its memory.
  changed_.wait_until(hold, std::min(progress_ + patience_,
                                     std::chrono::steady_clock::now() + std::chrono::milliseconds(100)));
  return !IsFull() || std::chrono::steady_clock::now() - progress_ <= patience_;
}

AsideBlock::AsideBlock(std::shared_ptr<AsideMemory> memory, int64_t row_bytes)
    : memory_(std::move(memory)),
      record_bytes_((static_cast<int64_t>(sizeof(AsideRow)) + row_bytes + 7) / 8 * 8),
      capacity_(std::max<int64_t>(1, kBlockBytes / record_bytes_)),
      data_(static_cast<size_t>(capacity_ * record_bytes_), Pages::kOrdinary,
            "rows put aside for an export") {
  memory_->Grow(capacity_ * record_bytes_);
}

AsideBlock::~AsideBlock() { memory_->Shrink(capacity_ * record_bytes_); }

void ShardMoment::PutAside(const RowStore& rows, uint32_t row) {
  if (aside_.empty() || aside_.back()->full()) {
    aside_.push_back(std::make_unique<AsideBlock>(whole_->memory, rows.row_bytes()));
  }
  const uint64_t position = static_cast<uint64_t>(shard_) << 32 | row;
  const char* bytes;
  FileReads read;
  if (rows.cache() == nullptr || rows.cache()->IsHere(row)) {
    bytes = rows.Row(row);
  } else {
    read.Add(*rows.cache(), row);
    read.Run();
    bytes = read.Row(0);
  }
  const Rank rank = whole_->rank_of ? whole_->rank_of(position) : Rank();
  aside_.back()->Add({*rows.StampOf(row), rank, Born(row) ? uint64_t{1} : 0}, bytes, rows.row_bytes());
}

}  // namespace kvtable
