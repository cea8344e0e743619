#include "base/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace kvtable {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;  // bits reversed

// What one more byte does to a checksum, for each value of its low byte.
constexpr std::array<uint32_t, 256> MakeByteTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
    table[byte] = crc;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kByteTable = MakeByteTable();

uint32_t ExtendByBytes(uint32_t state, const uint8_t* data, size_t size) {
  for (size_t i = 0; i < size; ++i) state = (state >> 8) ^ kByteTable[(state ^ data[i]) & 0xFF];
  return state;
}

#if defined(__x86_64__)

// The instruction takes 3 cycles and can begin in each, so three runs of as many bytes are done side by side: long ones of
// long data, and short ones of what is left.
constexpr size_t kLongRun = 4096;
constexpr size_t kShortRun = 64;

// What `kRun` zero bytes do to a checksum: a linear map, as four tables for its four bytes.
template <size_t kRun>
struct ZeroRun {
  uint32_t table[4][256];

  ZeroRun() {
    uint32_t columns[32];
    for (int bit = 0; bit < 32; ++bit) {
      columns[bit] = uint32_t{1} << bit;
      for (size_t i = 0; i < kRun; ++i) {
        columns[bit] = (columns[bit] >> 8) ^ kByteTable[columns[bit] & 0xFF];
      }
    }
    for (int byte = 0; byte < 4; ++byte) {
      for (int value = 0; value < 256; ++value) {
        uint32_t image = 0;
        for (int bit = 0; bit < 8; ++bit) image ^= value >> bit & 1 ? columns[8 * byte + bit] : 0;
        table[byte][value] = image;
      }
    }
  }

  uint32_t Append(uint32_t state) const {
    return table[0][state & 0xFF] ^ table[1][state >> 8 & 0xFF] ^ table[2][state >> 16 & 0xFF] ^
           table[3][state >> 24];
  }
};

uint64_t Word(const uint8_t* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

// Of as many times three runs as there are; moves `data` and `size` past them.
template <size_t kRun>
__attribute__((target("sse4.2"))) uint32_t ExtendByRuns(uint32_t state, const uint8_t** data, size_t* size) {
  static const ZeroRun<kRun> kZeroRun;
  for (; *size >= 3 * kRun; *data += 3 * kRun, *size -= 3 * kRun) {
    uint64_t first = state, second = 0, third = 0;
    for (size_t i = 0; i < kRun; i += 8) {
      first = _mm_crc32_u64(first, Word(*data + i));
      second = _mm_crc32_u64(second, Word(*data + kRun + i));
      third = _mm_crc32_u64(third, Word(*data + 2 * kRun + i));
    }
    const uint32_t two = kZeroRun.Append(static_cast<uint32_t>(first)) ^ static_cast<uint32_t>(second);
    state = kZeroRun.Append(two) ^ static_cast<uint32_t>(third);
  }
  return state;
}

__attribute__((target("sse4.2"))) uint32_t ExtendByInstruction(uint32_t state, const uint8_t* data,
                                                               size_t size) {
  state = ExtendByRuns<kLongRun>(state, &data, &size);
  state = ExtendByRuns<kShortRun>(state, &data, &size);
  uint64_t wide = state;
  for (; size >= 8; data += 8, size -= 8) wide = _mm_crc32_u64(wide, Word(data));
  state = static_cast<uint32_t>(wide);
  for (; size > 0; ++data, --size) state = _mm_crc32_u8(state, *data);
  return state;
}

#endif

}  // namespace

uint32_t ExtendCrc32c(uint32_t crc, const uint8_t* data, size_t size) {
#if defined(__x86_64__)
  static const bool kHasInstruction = __builtin_cpu_supports("sse4.2");
  if (kHasInstruction) return ~ExtendByInstruction(~crc, data, size);
#endif
  return ~ExtendByBytes(~crc, data, size);
}

}  // namespace kvtable
