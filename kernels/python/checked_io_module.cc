// kvtools._checked_io: bytes to and from files with their CRC-32C, in pieces that stay in the processor's
// cache, without the GIL: one thread reads and checks while another writes.
#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>

#include "base/crc32c.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace kvtable {
namespace {

constexpr size_t kPiece = 256 * 1024;

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void ThrowErrno(int number) {
  errno = number;
  PyErr_SetFromErrno(PyExc_OSError);
  throw nb::python_error();
}

// How many bytes were read, fewer than asked for only at the end of the file, and the checksum that goes on
// from `crc`.
std::pair<size_t, uint32_t> Read(int file, Bytes data, int64_t offset, uint32_t crc, bool check) {
  size_t done = 0;
  int error = 0;
  {
    nb::gil_scoped_release release;
    while (done < data.size()) {
      const size_t size = std::min(kPiece, data.size() - done);
      const ssize_t count = pread(file, data.data() + done, size, offset + static_cast<int64_t>(done));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) error = errno;
      if (count <= 0) break;
      if (check) crc = ExtendCrc32c(crc, data.data() + done, static_cast<size_t>(count));
      done += static_cast<size_t>(count);
    }
  }
  if (error != 0) ThrowErrno(error);
  return {done, crc};
}

// Lets whole pages begin their way to the disk, so that the sync at the end has less to wait for. Only a
// hint.
void StartToDisk(int file, int64_t from, int64_t to) {
#if defined(__linux__)
  constexpr int64_t kPage = 4096;
  from -= from % kPage;
  to -= to % kPage;
  if (to - from >= static_cast<int64_t>(kPiece)) {
    nb::gil_scoped_release release;
    sync_file_range(file, from, to - from, SYNC_FILE_RANGE_WRITE);
  }
#else
  (void)file, (void)from, (void)to;
#endif
}

uint32_t Write(int file, ConstBytes data, int64_t offset, uint32_t crc) {
  // The system lets one writer at a time into a file, and those who wait for it there keep a processor busy:
  // here they sleep, or check what they will write next.
  static std::mutex turn;
  size_t done = 0;
  int error = 0;
  {
    nb::gil_scoped_release release;
    while (done < data.size() && error == 0) {
      const size_t size = std::min(kPiece, data.size() - done);
      crc = ExtendCrc32c(crc, data.data() + done, size);
      for (const size_t end = done + size; done < end && error == 0;) {
        const std::lock_guard<std::mutex> lock(turn);
        const ssize_t count =
            pwrite(file, data.data() + done, end - done, offset + static_cast<int64_t>(done));
        if (count >= 0) {
          done += static_cast<size_t>(count);
        } else if (errno != EINTR) {
          error = errno;
        }
      }
    }
  }
  if (error != 0) ThrowErrno(error);
  StartToDisk(file, offset, offset + static_cast<int64_t>(done));
  return crc;
}

}  // namespace

NB_MODULE(_checked_io, m) {
  m.doc() = "Bytes to and from files with their CRC-32C, without the GIL.";
  m.def("read", &Read, "file"_a, "data"_a, "offset"_a, "crc"_a = 0, "check"_a = true,
        R"(Fill an array from a file, and extend a CRC-32C over it.

Args:
    file: an open descriptor.
    data: (n,) of uint8, filled from byte `offset` of the file on.
    offset: where to read.
    crc: the checksum to go on from.
    check: False: leave the checksum as it is.

Returns:
    How many bytes were read, fewer than n only at the end of the file, and the checksum.

Raises:
    OSError: the system could not read.
)");
  m.def("write", &Write, "file"_a, "data"_a, "offset"_a, "crc"_a = 0,
        R"(Write an array to a file, and extend a CRC-32C over it.

Args:
    file: an open descriptor.
    data: (n,) of uint8, written from byte `offset` of the file on.
    offset: where to write.
    crc: the checksum to go on from.

Returns:
    The checksum.

Raises:
    OSError: the system could not write all.
)");
}

}  // namespace kvtable
