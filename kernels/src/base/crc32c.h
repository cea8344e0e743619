// CRC-32C (Castagnoli, RFC 3720 appendix B.4), by the processor's own instruction where it has one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtable {

// The checksum of the bytes that `crc` is of, followed by `size` bytes at `data`; 0 is that of no bytes. Any
// thread.
uint32_t ExtendCrc32c(uint32_t crc, const uint8_t* data, size_t size);

}  // namespace kvtable
