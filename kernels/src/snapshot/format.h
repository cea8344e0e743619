// The bytes of a snapshot, version 1: docs/dialects/snapshot.md. Integers are little-endian.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/hash.h"
#include "kvtable/snapshot.h"
#include "kvtable/types.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a snapshot's bytes are used where they lie");

namespace kvtable {
namespace snapshot_format {

inline constexpr uint8_t kMagic[8] = {0x89, 'K', 'V', 'S', '\r', '\n', 0x1a, '\n'};
inline constexpr uint32_t kVersion = 1;
inline constexpr int64_t kHeaderBytes = 128;
inline constexpr int64_t kAlignment = 4096;        // of sections
inline constexpr int64_t kCheckedBytes = 1 << 20;  // of a section, under one checksum
inline constexpr int64_t kKeysPerBucket = 4;       // what the writer aims at

struct Header {
  uint8_t magic[8];
  uint32_t version;
  uint32_t tables;
  uint64_t file_bytes;
  uint64_t description_offset;
  uint64_t description_bytes;
  uint64_t checksums_offset;
  uint64_t checksums_bytes;
  uint32_t description_crc;
  uint32_t checksums_crc;
  uint64_t fingerprint[2];
  uint8_t zeros[44];
  uint32_t header_crc;  // of the bytes before
};
static_assert(sizeof(Header) == kHeaderBytes);

// The description: this, the tables' records, their names, the JSON.
struct DescriptionStart {
  uint64_t json_offset;  // from the description's first byte
  uint64_t json_bytes;
};

struct SectionRecord {
  uint64_t offset;
  uint64_t bytes;
};

struct TableRecord {
  uint32_t name_offset;  // from the description's first byte
  uint32_t name_bytes;
  uint8_t key_type;
  uint8_t value_type;
  uint8_t row_form;  // a RowForm
  uint8_t frequency_type;
  uint8_t version_type;
  uint8_t entry_bytes;  // of the directory
  uint16_t zero;
  uint32_t dim;
  uint32_t row_bytes;
  uint64_t rows;
  uint64_t buckets;
  SectionRecord sections[SnapshotTable::kSections];
  uint64_t duplicates;
  uint8_t zeros[16];
};
static_assert(sizeof(TableRecord) == 160);

inline constexpr const char* kSectionNames[SnapshotTable::kSections] = {
    "directory", "keys", "rows", "frequencies", "versions", "default row"};

// Numbers in the file, from 1 on; 0 is none.
inline constexpr KeyType kKeyTypes[] = {KeyType::kInt64, KeyType::kInt32, KeyType::kUint64};
inline constexpr ValueType kValueTypes[] = {ValueType::kFloat32, ValueType::kFloat16, ValueType::kBFloat16,
                                            ValueType::kFloat64, ValueType::kInt8,    ValueType::kInt32,
                                            ValueType::kInt64,   ValueType::kBool};
// uint32, int64, uint64, int32, uint16, int16, uint8, int8.
inline constexpr int64_t kCounterBytes[] = {0, 4, 8, 8, 4, 2, 2, 1, 1};
inline constexpr int kCounterTypes = 8;

template <class T, size_t kCount>
uint8_t NumberOf(const T (&types)[kCount], T type) {
  for (size_t i = 0; i < kCount; ++i) {
    if (types[i] == type) return static_cast<uint8_t>(i + 1);
  }
  return 0;
}

// Keys are in the file as Mix64 makes them, in rising order; this makes a key of one again.
inline uint64_t UnmixKey(uint64_t x) {
  x ^= x >> 31 ^ x >> 62;
  x *= 0x319642b2d24d8ec3ULL;
  x ^= x >> 27 ^ x >> 54;
  x *= 0x96de1b173f119089ULL;
  return x ^ x >> 30 ^ x >> 60;
}

// Rises with the mixed key, so that the order by mixed key is the order by bucket.
inline uint64_t BucketOfMixed(uint64_t mixed, uint64_t buckets) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(mixed) * buckets >> 64);
}

// Of the words of `size` bytes, the last one filled up with zeros; goes on from `state`.
inline void ExtendFingerprint(uint64_t (&state)[2], const void* data, size_t size) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  for (size_t at = 0; at < size; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + at, size - at < 8 ? size - at : 8);
    state[0] = Mix64(state[0] ^ word);
    state[1] = Mix64(state[1] + word) ^ state[0];
  }
}

inline int64_t Pieces(int64_t bytes) { return (bytes + kCheckedBytes - 1) / kCheckedBytes; }

}  // namespace snapshot_format
}  // namespace kvtable
