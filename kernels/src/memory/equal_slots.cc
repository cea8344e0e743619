#include "memory/equal_slots.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvtable {
namespace {

constexpr size_t kAlignment = 64;

// Memory that would end in the second half of a huge page takes the rest of it, too.
size_t WithRest(size_t bytes) {
  const size_t end = bytes % kHugePage;
  return end >= kHugePage / 2 ? bytes + kHugePage - end : bytes;
}

}  // namespace

struct EqualSlots::Block {
  enum class State : uint8_t { kFresh, kTaken, kGivenBack };

  Block(Region memory, size_t owners)
      : region(std::move(memory)),
        slot_bytes(region.size() / owners / kAlignment * kAlignment),
        states(owners, State::kFresh) {}

  char* At(size_t owner) const { return region.data() + owner * slot_bytes; }
  // The huge pages that nobody but this owner is on.
  char* BeginOfAlone(size_t owner) const {
    const auto begin = reinterpret_cast<uintptr_t>(At(owner));
    return At(owner) + (kHugePage - begin % kHugePage) % kHugePage;
  }
  size_t BytesAlone(size_t owner) const {
    const auto end = reinterpret_cast<uintptr_t>(At(owner) + slot_bytes) / kHugePage * kHugePage;
    const auto begin = reinterpret_cast<uintptr_t>(BeginOfAlone(owner));
    return end > begin ? end - begin : 0;
  }
  // Of a slot that is given back these stay in memory.
  size_t BytesShared(size_t owner) const { return slot_bytes - BytesAlone(owner); }

  Region region;
  size_t slot_bytes;
  std::vector<State> states;  // by owner
  size_t taken = 0;           // slots
  size_t idle = 0;            // bytes
};

EqualSlots::EqualSlots(int owners, bool huge_pages, const char* what)
    : owners_(static_cast<size_t>(owners)), huge_pages_(huge_pages), what_(what) {}

void EqualSlots::BeginBlock(size_t bytes) {
  current_ = std::make_shared<Block>(Region(WithRest(bytes * owners_), Pages::kHuge, what_), owners_);
  current_bytes_.store(current_->slot_bytes, std::memory_order_relaxed);
}

EqualSlots::Slot EqualSlots::Take(int owner, size_t bytes) {
  Slot slot;
  slot.owner_ = static_cast<size_t>(owner);
  bool zero = false;
  {
    std::lock_guard<std::mutex> hold(mutex_);
    // An owner of more than its share would make all slots too large.
    const bool as_others = bytes * owners_ <= taken_ + taken_ / 3;
    const bool larger = current_ == nullptr || current_->slot_bytes < bytes;
    if (larger && as_others && InBlock(bytes)) BeginBlock(bytes);
    if (current_ != nullptr && Fits(bytes, current_->slot_bytes) &&
        current_->states[slot.owner_] != Block::State::kTaken) {
      zero = current_->states[slot.owner_] == Block::State::kGivenBack;
      if (zero) {
        current_->idle -= current_->BytesShared(slot.owner_);
        idle_ -= current_->BytesShared(slot.owner_);
      }
      current_->states[slot.owner_] = Block::State::kTaken;
      ++current_->taken;
      slot.block_ = current_;
      slot.data_ = current_->At(slot.owner_);
      slot.bytes_ = current_->slot_bytes;
      taken_ += slot.bytes_;
    }
  }
  if (slot.block_ == nullptr) {
    slot.own_ =
        Region(huge_pages_ ? WithRest(bytes) : bytes, huge_pages_ ? Pages::kHuge : Pages::kOrdinary, what_);
    slot.data_ = slot.own_.data();
    slot.bytes_ = slot.own_.size();
    std::lock_guard<std::mutex> hold(mutex_);
    taken_ += slot.bytes_;
  }
  slot.of_ = this;
  if (zero) std::memset(slot.data_, 0, slot.bytes_);
  return slot;
}

void EqualSlots::Prepare(size_t bytes) {
  if (!InBlock(bytes)) return;
  std::lock_guard<std::mutex> hold(mutex_);
  if (current_ != nullptr && current_->slot_bytes >= bytes) return;
  BeginBlock(bytes);
}

size_t EqualSlots::idle_bytes() const {
  std::lock_guard<std::mutex> hold(mutex_);
  return idle_;
}

void EqualSlots::GiveBack(Slot* slot) noexcept {
  const std::shared_ptr<Block> block = std::move(slot->block_);
  std::shared_ptr<Block> current;  // let go of without the lock
  if (block != nullptr) {
    const size_t alone = block->BytesAlone(slot->owner_);
    if (alone > 0) ::madvise(block->BeginOfAlone(slot->owner_), alone, MADV_DONTNEED);
  }
  std::lock_guard<std::mutex> hold(mutex_);
  taken_ -= slot->bytes_;
  if (block == nullptr) return;
  block->states[slot->owner_] = Block::State::kGivenBack;
  block->idle += block->BytesShared(slot->owner_);
  idle_ += block->BytesShared(slot->owner_);
  if (--block->taken > 0) return;
  idle_ -= block->idle;
  if (block != current_) return;
  current = std::move(current_);
  current_bytes_.store(0, std::memory_order_relaxed);
}

EqualSlots::Slot::~Slot() {
  if (of_ != nullptr) of_->GiveBack(this);
}

EqualSlots::Slot::Slot(Slot&& other) noexcept { *this = std::move(other); }

EqualSlots::Slot& EqualSlots::Slot::operator=(Slot&& other) noexcept {
  std::swap(of_, other.of_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(own_, other.own_);
  std::swap(block_, other.block_);
  std::swap(owner_, other.owner_);
  return *this;
}

}  // namespace kvtable
