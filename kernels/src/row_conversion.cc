#include "row_conversion.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "always_inline.h"
#include "elements.h"
#include "float16.h"
#include "instruction_set.h"

namespace kvtable {
namespace {

// Rounds |f| <= the largest finite number.
KVTABLE_ALWAYS_INLINE inline BFloat16 RoundStochastically(float f, uint32_t random, BFloat16) {
  // Numbers of one binade lie evenly, and binades adjoin: adding below the last bit that stays carries into
  // it with the right probability.
  return {static_cast<uint16_t>((BitsOf(f) + (random >> 16)) >> 16)};
}

KVTABLE_ALWAYS_INLINE inline Float16 RoundStochastically(float f, uint32_t random, Float16) {
  const uint32_t bits = BitsOf(f);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - (112u << 23) + (random >> 19)) >> 13;
  // Below 2^-14, the numbers are the multiples of 2^-24.
  const uint32_t is_subnormal = magnitude < 0x38800000u;
  const float multiple = FloatOf(magnitude & (0u - is_subnormal)) * 0x1p24f;
  const int32_t whole = static_cast<int32_t>(multiple);
  const float uniform = static_cast<float>(static_cast<int32_t>(random >> 8)) * 0x1p-24f;  // [0, 1)
  const uint32_t up = uniform < multiple - static_cast<float>(whole);
  const uint32_t subnormal = static_cast<uint32_t>(whole) + up;
  const uint32_t rounded = (normal & (is_subnormal - 1u)) | (subnormal & (0u - is_subnormal));
  return {static_cast<uint16_t>((bits >> 16 & 0x8000u) | rounded)};
}

template <class T>
constexpr uint32_t kLargestBits = 0;  // of the largest finite number, as a float
template <>
constexpr uint32_t kLargestBits<BFloat16> = 0x7f7f0000u;
template <>
constexpr uint32_t kLargestBits<Float16> = 0x477fe000u;  // 65,504

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
    const uint32_t rounded = RoundStochastically(from[j], bits[j], T{}).bits;
    const uint32_t nearest = Element<T>::Store(from[j]).bits;
    // Masks: GCC vectorizes no loop in which it sees a branch.
    const uint32_t is_large = (BitsOf(from[j]) & 0x7fffffffu) > kLargestBits<T>;  // or infinite, or NaN
    y[j].bits = static_cast<uint16_t>((rounded & (is_large - 1u)) | (nearest & (0u - is_large)));
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
