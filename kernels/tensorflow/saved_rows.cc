#include "saved_rows.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "saved_part.h"
#include "tensorflow/core/lib/hash/crc32c.h"
#include "tensorflow/core/util/tensor_bundle/naming.h"

namespace kvtools {

namespace tf = tensorflow;

namespace {

// Bytes are read and checked in pieces that stay in the processor's cache in between.
constexpr int64_t kReadPieceBytes = 1 << 20;

// CRCs are remainders of polynomials over two elements, here with the first bit as the highest power: a checksum
// grows by n bytes as by a product with x^(8n).
constexpr uint32_t kPolynomial = 0x82F63B78;

uint32_t Product(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = uint32_t{1} << 31; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = (b & 1) != 0 ? (b >> 1) ^ kPolynomial : b >> 1;
  }
  return product;
}

// The checksum of some bytes followed by `bytes` others.
uint32_t Joined(uint32_t first, uint32_t second, int64_t bytes) {
  uint32_t power = uint32_t{1} << 31;         // x^0
  uint32_t square = uint32_t{1} << (31 - 8);  // x^8
  for (; bytes > 0; bytes >>= 1) {
    if ((bytes & 1) != 0) power = Product(square, power);
    square = Product(square, square);
  }
  return Product(power, first) ^ second;
}

// TensorFlow's newer interface where there is one: the older is deprecated then.
template <class File>
auto ReadAt(const File& file, uint64_t offset, absl::Span<char> out, absl::string_view* got, int)
    -> decltype(file.Read(offset, *got, out)) {
  return file.Read(offset, *got, out);
}
template <class File>
absl::Status ReadAt(const File& file, uint64_t offset, absl::Span<char> out, absl::string_view* got, long) {
  return file.Read(offset, out.size(), got, out.data());
}

}  // namespace

DataFiles::DataFiles(tf::Env* env, std::string prefix, int32_t files)
    : env_(env), prefix_(std::move(prefix)), files_(files) {}

absl::Status DataFiles::Open(int32_t file, DataFile** opened) {
  const std::lock_guard<std::mutex> hold(mutex_);
  DataFile& at = opened_[file];
  if (at.local == nullptr && at.other == nullptr) {
    const std::string name = tf::DataFilename(prefix_, file, files_);
    at.local = LocalReader::Open(name);
    if (at.local == nullptr) TF_RETURN_IF_ERROR(env_->NewRandomAccessFile(name, &at.other));
  }
  *opened = &at;
  return absl::OkStatus();
}

absl::Status DataFiles::ReadPiece(DataFile* from, int64_t offset, int64_t size, char* out) {
  if (from->local != nullptr) return from->local->Read(offset, size, out);
  absl::string_view got;
  TF_RETURN_IF_ERROR(ReadAt(*from->other, static_cast<uint64_t>(offset),
                            absl::MakeSpan(out, static_cast<size_t>(size)), &got, 0));
  if (got.size() != static_cast<size_t>(size)) return errors::DataLoss("the data file ends before it");
  if (got.data() != out) std::memcpy(out, got.data(), got.size());  // a file that is mapped
  return absl::OkStatus();
}

absl::Status DataFiles::Read(int32_t file, int64_t offset, int64_t size, char* out, uint32_t* crc) {
  DataFile* from = nullptr;
  TF_RETURN_IF_ERROR(Open(file, &from));
  for (int64_t done = 0; done < size;) {
    const int64_t piece = std::min(kReadPieceBytes, size - done);
    TF_RETURN_IF_ERROR(ReadPiece(from, offset + done, piece, out + done));
    *crc = tf::crc32c::Extend(*crc, out + done, static_cast<size_t>(piece));
    done += piece;
  }
  return absl::OkStatus();
}

absl::Status ColumnReader::Differs() const {
  return Damaged(where_, column_->name, "differs from its checksum");
}

absl::Status ColumnReader::Read(int64_t start, int64_t rows, char* out) {
  const int64_t row_bytes = column_->row_bytes;
  auto run = std::upper_bound(column_->runs.begin(), column_->runs.end(), start,
                              [](int64_t row, const StoredRun& run) { return row < run.start + run.rows; });
  for (const int64_t end = start + rows; start < end; ++run) {
    const int64_t count = std::min(end, run->start + run->rows) - start;
    uint32_t crc = 0;
    TF_RETURN_IF_ERROR(ReadError(where_, column_->name,
                                 files_->Read(run->file, run->offset + (start - run->start) * row_bytes,
                                              count * row_bytes, out, &crc)));
    if (count == run->rows) {
      if (crc != run->crc) return Differs();
    } else {
      const std::lock_guard<std::mutex> hold(mutex_);
      pieces_[static_cast<size_t>(run - column_->runs.begin())][start] = {crc, count * row_bytes};
    }
    start += count;
    out += count * row_bytes;
  }
  return absl::OkStatus();
}

absl::Status ColumnReader::Finish() {
  for (const auto& [run, pieces] : pieces_) {
    uint32_t crc = 0;
    for (const auto& [start, piece] : pieces) crc = Joined(crc, piece.crc, piece.bytes);
    if (crc != column_->runs[run].crc) return Differs();
  }
  return absl::OkStatus();
}

}  // namespace kvtools
