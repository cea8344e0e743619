// Copying the rows of all lanes' keys, all lanes together.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace kvtable {

struct alignas(16) Chunk16 {
  uint64_t words[2];
};

template <class Chunk, class Lanes>
KVTABLE_HOST_DEVICE inline void CopyChunks(const Lanes& lanes, char* to, const char* from, uint32_t chunks) {
  // The chunks of all lanes' rows in one sequence, so that no lane idles whatever the width of a row. Some
  // loads first, then the stores: the loads' latencies pass at the same time.
  constexpr uint32_t kAtOnce = 4;
  const uint64_t total = uint64_t{chunks} * Lanes::kCount;
  for (uint64_t begin = 0; begin < total; begin += kAtOnce * Lanes::kCount) {
    Chunk data[kAtOnce];
    Chunk* targets[kAtOnce];
    KVTABLE_UNROLL
    for (uint32_t u = 0; u < kAtOnce; ++u) {
      const uint64_t at = begin + u * Lanes::kCount + lanes.lane();
      const bool is_there = at < total;
      const uint32_t owner = is_there ? static_cast<uint32_t>(at / chunks) : 0;
      const uint32_t chunk = static_cast<uint32_t>(at - uint64_t{owner} * chunks);
      const Chunk* const source = reinterpret_cast<const Chunk*>(lanes.From(owner, from));
      Chunk* const target = reinterpret_cast<Chunk*>(lanes.From(owner, to));
      data[u] = Chunk{};
      targets[u] = is_there && target != nullptr ? target + chunk : nullptr;
      if (targets[u] != nullptr && source != nullptr) data[u] = source[chunk];
    }
    KVTABLE_UNROLL
    for (uint32_t u = 0; u < kAtOnce; ++u) {
      if (targets[u] != nullptr) *targets[u] = data[u];
    }
  }
}

// Copies `bytes` bytes from each lane's `from` to its `to`: zeros where `from` is null, nothing where `to`
// is. All addresses are multiples of 2^alignment, 1 to 16, and so is `bytes`. All lanes take part.
template <class Lanes>
KVTABLE_HOST_DEVICE inline void CopyRows(const Lanes& lanes, char* to, const char* from, int64_t bytes,
                                         int alignment) {
  const uint32_t chunks = static_cast<uint32_t>(bytes >> alignment);
  switch (alignment) {
    case 4:
      return CopyChunks<Chunk16>(lanes, to, from, chunks);
    case 3:
      return CopyChunks<uint64_t>(lanes, to, from, chunks);
    case 2:
      return CopyChunks<uint32_t>(lanes, to, from, chunks);
    case 1:
      return CopyChunks<uint16_t>(lanes, to, from, chunks);
    default:
      return CopyChunks<uint8_t>(lanes, to, from, chunks);
  }
}

// The largest alignment, at most 4, for addresses and sizes with these bits.
inline int AlignmentOf(uint64_t bits) {
  int alignment = 0;
  while (alignment < 4 && (bits >> alignment & 1) == 0) ++alignment;
  return alignment;
}

}  // namespace kvtable
