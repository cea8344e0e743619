// Which part of a partitioned table a key belongs to.
#pragma once

#include <cstdint>
#include <type_traits>

namespace kvtable {

// key floor-mod parts, so that -1 of 3 parts is 2. Division by a number that is not known when compiling is
// slow, so it is done once: 2^64 / parts, by which keys are multiplied.
template <class Key>
class PartOf {
 public:
  explicit PartOf(int64_t parts)
      : parts_(static_cast<uint64_t>(parts)),
        inverse_(UINT64_MAX / parts_),
        of_two_to_64_((UINT64_MAX % parts_ + 1) % parts_) {}

  int64_t operator()(Key key) const {
    const uint64_t bits = static_cast<uint64_t>(key);  // of a negative key: 2^64 more than it
    // The quotient is right or one too small.
    const uint64_t quotient = static_cast<uint64_t>(static_cast<unsigned __int128>(bits) * inverse_ >> 64);
    uint64_t rest = bits - quotient * parts_;
    if (rest >= parts_) rest -= parts_;
    if constexpr (std::is_signed_v<Key>) {
      if (key < 0) rest = rest >= of_two_to_64_ ? rest - of_two_to_64_ : rest + parts_ - of_two_to_64_;
    }
    return static_cast<int64_t>(rest);
  }

 private:
  uint64_t parts_;
  uint64_t inverse_;
  uint64_t of_two_to_64_;  // 2^64 mod parts
};

}  // namespace kvtable
