// How the values of rows get to where a lookup wants them: as they are, or from 16 bits to float32.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/always_inline.h"
#include "kvtable/table.h"
#include "memory/copy_rows.h"
#include "memory/scratch.h"
#include "values/row_conversion.h"

namespace kvtable {

// One row at a time, wherever its value comes from. Throws Error(kInvalidArgument) where a type cannot be widened.
class RowsWriter {
 public:
  RowsWriter(const RowsOut& out, ValueType type, int64_t dim)
      : out_(out),
        dim_(dim),
        value_bytes_(dim * SizeOf(type)),
        bytes_(out.row_bytes(type, dim)),
        widen_(out.widened ? WidenRow(type) : nullptr) {}

  char* At(int64_t i) const { return out_.rows + out_.PlaceOf(i) * bytes_; }  // of key i
  int64_t bytes() const { return bytes_; }                                    // of a row there

  void Copy(int64_t i, const char* value) const {
    if (widen_ != nullptr) return widen_(value, dim_, reinterpret_cast<float*>(At(i)));
    std::memcpy(At(i), value, static_cast<size_t>(bytes_));
  }
  void Zero(int64_t i) const { std::memset(At(i), 0, static_cast<size_t>(bytes_)); }
  // fill(to) writes the value.
  template <class Fill>
  void Make(int64_t i, const Fill& fill) const {
    if (widen_ == nullptr) return fill(At(i));
    Scratch<char> value(static_cast<size_t>(value_bytes_));
    fill(value.data());
    Copy(i, value.data());
  }

 private:
  const RowsOut& out_;
  const int64_t dim_;
  const int64_t value_bytes_;
  const int64_t bytes_;
  const decltype(RowConversion::load) widen_;  // null: as they are
};

// Copying where rows are many. Of kBytes bytes, or any number.
template <int64_t kBytes>
struct SameRows {
  int64_t bytes;

  KVTABLE_ALWAYS_INLINE int64_t out_bytes() const { return kBytes != kAnyBytes ? kBytes : bytes; }
  KVTABLE_ALWAYS_INLINE void Prefetch(const char* row) const { PrefetchRow<kBytes>(row, bytes); }
  KVTABLE_ALWAYS_INLINE void PrefetchOut(const char* to, bool to_be_written) const {
    to_be_written ? PrefetchRow<kBytes, true>(to, bytes) : PrefetchRow<kBytes>(to, bytes);
  }
  KVTABLE_ALWAYS_INLINE void Copy(char* to, const char* row) const { CopyRow<kBytes>(to, row, bytes); }
};
struct WidenedRows {
  decltype(RowConversion::load) widen;
  int64_t dim;

  KVTABLE_ALWAYS_INLINE int64_t out_bytes() const { return dim * int64_t{sizeof(float)}; }
  KVTABLE_ALWAYS_INLINE void Prefetch(const char* row) const { PrefetchRow<kAnyBytes>(row, out_bytes() / 2); }
  KVTABLE_ALWAYS_INLINE void PrefetchOut(const char* to, bool to_be_written) const {
    to_be_written ? PrefetchRow<kAnyBytes, true>(to, out_bytes()) : PrefetchRow<kAnyBytes>(to, out_bytes());
  }
  KVTABLE_ALWAYS_INLINE void Copy(char* to, const char* row) const {
    widen(row, dim, reinterpret_cast<float*>(to));
  }
};

// Calls visit with that of these which fits.
template <class Visit>
void VisitRowCopy(const RowsOut& out, ValueType type, int64_t dim, const Visit& visit) {
  if (out.widened) return visit(WidenedRows{WidenRow(type), dim});
  const int64_t bytes = dim * SizeOf(type);
  VisitRowBytes(bytes, [&](auto known) { visit(SameRows<decltype(known)::value>{bytes}); });
}

}  // namespace kvtable
