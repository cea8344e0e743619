#include "values/row_conversion.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/always_inline.h"
#include "base/instruction_set.h"
#include "values/elements.h"
#include "values/stochastic_rounding.h"

namespace kvtable {
namespace {

template <class T>
KVTABLE_ALWAYS_INLINE inline void LoadRow(const void* from, int64_t n, float* __restrict to) {
  const T* __restrict const x = static_cast<const T*>(from);
  for (int64_t j = 0; j < n; ++j) to[j] = Element<T>::Load(x[j]);
}
template <class T>
KVTABLE_ALWAYS_INLINE inline void AccumulateRow(const void* from, int64_t n, float* __restrict to) {
  const T* __restrict const x = static_cast<const T*>(from);
  for (int64_t j = 0; j < n; ++j) to[j] += Element<T>::Load(x[j]);
}
template <class T>
KVTABLE_ALWAYS_INLINE inline void StoreRow(const float* __restrict from, int64_t n, void* to) {
  T* __restrict const y = static_cast<T*>(to);
  for (int64_t j = 0; j < n; ++j) y[j] = Element<T>::Store(from[j]);
}
template <class T>
KVTABLE_ALWAYS_INLINE inline void StoreRowStochastically(const float* __restrict from, int64_t n,
                                                         const uint32_t* __restrict bits, void* to) {
  T* __restrict const y = static_cast<T*>(to);
  for (int64_t j = 0; j < n; ++j) {
    y[j] = StoreStochastically<T>(from[j], bits[j]);
  }
}

// `attributes` may be empty.
#define KVTABLE_ROW_CONVERSION(Set, attributes)                                                        \
  template <class T>                                                                                   \
  struct Set {                                                                                         \
    attributes static void Load(const void* from, int64_t n, float* to) { LoadRow<T>(from, n, to); }   \
    attributes static void Accumulate(const void* from, int64_t n, float* to) {                        \
      AccumulateRow<T>(from, n, to);                                                                   \
    }                                                                                                  \
    attributes static void Store(const float* from, int64_t n, void* to) { StoreRow<T>(from, n, to); } \
    attributes static void StoreStochastically(const float* from, int64_t n, const uint32_t* bits,     \
                                               void* to) {                                             \
      StoreRowStochastically<T>(from, n, bits, to);                                                    \
    }                                                                                                  \
    static RowConversion All() { return {Load, Accumulate, Store, StoreStochastically}; }              \
  }

KVTABLE_ROW_CONVERSION(Baseline, );
#if defined(__x86_64__)
KVTABLE_ROW_CONVERSION(Avx2, KVTABLE_TARGET_AVX2);
KVTABLE_ROW_CONVERSION(Avx512, KVTABLE_TARGET_AVX512);

// Rows of float16, by the CPU's own conversion.

KVTABLE_TARGET_AVX2 inline __m256 LoadEight(const Float16* x) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}

KVTABLE_TARGET_AVX2 void LoadFloat16(const void* from, int64_t n, float* to) {
  const Float16* const x = static_cast<const Float16*>(from);
  int64_t j = 0;
  for (; j + 8 <= n; j += 8) _mm256_storeu_ps(to + j, LoadEight(x + j));
  LoadRow<Float16>(x + j, n - j, to + j);
}

KVTABLE_TARGET_AVX2 void AccumulateFloat16(const void* from, int64_t n, float* to) {
  const Float16* const x = static_cast<const Float16*>(from);
  int64_t j = 0;
  for (; j + 8 <= n; j += 8) {
    _mm256_storeu_ps(to + j, _mm256_add_ps(_mm256_loadu_ps(to + j), LoadEight(x + j)));
  }
  AccumulateRow<Float16>(x + j, n - j, to + j);
}

KVTABLE_TARGET_AVX2 void StoreFloat16(const float* from, int64_t n, void* to) {
  Float16* const y = static_cast<Float16*>(to);
  int64_t j = 0;
  for (; j + 8 <= n; j += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y + j),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + j), _MM_FROUND_TO_NEAREST_INT));
  }
  StoreRow<Float16>(from + j, n - j, y + j);
}
#endif

template <class T>
RowConversion Best() {
#if defined(__x86_64__)
  switch (BestInstructionSet()) {
    case InstructionSet::kAvx512:
      return Avx512<T>::All();
    case InstructionSet::kAvx2:
      return Avx2<T>::All();
    case InstructionSet::kBaseline:
      break;
  }
#endif
  return Baseline<T>::All();
}

}  // namespace

RowConversion BestRowConversion(ValueType type) {
  if (type == ValueType::kBFloat16) return Best<BFloat16>();
  RowConversion best = Best<Float16>();
#if defined(__x86_64__)
  if (BestInstructionSet() != InstructionSet::kBaseline) {
    best.load = LoadFloat16;
    best.accumulate = AccumulateFloat16;
    best.store = StoreFloat16;
  }
#endif
  return best;
}

}  // namespace kvtable
