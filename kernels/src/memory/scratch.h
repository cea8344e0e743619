// Working memory of one operation, kept by its thread for the next one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace kvtable {

// `n` uninitialized elements. Large buffers that come and go with each batch would cost more in page faults
// than the work done in them, so up to kKept of them stay with the thread, unless they are huge.
template <class T>
class Scratch {
  static_assert(sizeof(T) <= sizeof(uint64_t));

 public:
  explicit Scratch(size_t n) {
    for (std::vector<uint64_t>& kept : Kept()) {
      if (kept.capacity() > words_.capacity()) std::swap(kept, words_);
    }
    const size_t words = (n * sizeof(T) + sizeof(uint64_t) - 1) / sizeof(uint64_t);
    if (words_.size() < words) words_ = std::vector<uint64_t>(words);
  }
  ~Scratch() {
    if (words_.size() > kMaxWords) return;
    for (std::vector<uint64_t>& kept : Kept()) {
      if (kept.capacity() < words_.capacity()) std::swap(kept, words_);
    }
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  T* data() { return reinterpret_cast<T*>(words_.data()); }
  T& operator[](size_t i) { return data()[i]; }

 private:
  static constexpr size_t kKept = 8;
  static constexpr size_t kMaxWords = size_t{1} << 19;  // 4 MiB

  static std::array<std::vector<uint64_t>, kKept>& Kept() {
    thread_local std::array<std::vector<uint64_t>, kKept> kept;
    return kept;
  }

  std::vector<uint64_t> words_;
};

}  // namespace kvtable
