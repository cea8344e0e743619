#include "values/row_conversion.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/always_inline.h"
#include "base/instruction_set.h"
#include "values/elements.h"
#include "values/random.h"
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
                                                         uint64_t stream, uint64_t first_word, void* to) {
  T* __restrict const y = static_cast<T*>(to);
  constexpr int64_t kWords = 32;  // drawn at a time
  uint64_t words[kWords];
  for (int64_t begin = 0; begin < n; begin += 2 * kWords) {
    const int64_t count = n - begin < 2 * kWords ? n - begin : 2 * kWords;
    const uint64_t first = first_word + static_cast<uint64_t>(begin / 2);
    for (int64_t i = 0; i < (count + 1) / 2; ++i) {
      words[i] = RandomWord(stream, first + static_cast<uint64_t>(i));
    }
    uint32_t bits[2 * kWords];
    std::memcpy(bits, words, sizeof(bits));  // x86 and ARM have the low half first
    for (int64_t j = 0; j < count; ++j) y[begin + j] = StoreStochastically<T>(from[begin + j], bits[j]);
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
    attributes static void StoreStochastically(const float* from, int64_t n, uint64_t stream,          \
                                               uint64_t first_word, void* to) {                        \
      StoreRowStochastically<T>(from, n, stream, first_word, to);                                      \
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

// Stochastic rounding of a vector of elements at a time: the arithmetic of RandomWord, RoundStochastically and
// StoreStochastically.

constexpr uint64_t kWordStep = 0x9e3779b97f4a7c15ULL;  // between the arguments that words are mixed from

template <uint64_t kBy>
KVTABLE_TARGET_AVX2 inline __m256i MultiplyFour(__m256i x) {
  const __m256i by = _mm256_set1_epi64x(static_cast<int64_t>(kBy));
  const __m256i cross =
      _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(x, 32), by),
                       _mm256_mul_epu32(x, _mm256_set1_epi64x(static_cast<int64_t>(kBy >> 32))));
  return _mm256_add_epi64(_mm256_mul_epu32(x, by), _mm256_slli_epi64(cross, 32));
}

KVTABLE_TARGET_AVX2 inline __m256i MixFour(__m256i x) {  // Mix64 of each
  x = MultiplyFour<0xbf58476d1ce4e5b9ULL>(_mm256_xor_si256(x, _mm256_srli_epi64(x, 30)));
  x = MultiplyFour<0x94d049bb133111ebULL>(_mm256_xor_si256(x, _mm256_srli_epi64(x, 27)));
  return _mm256_xor_si256(x, _mm256_srli_epi64(x, 31));
}

// In the low 16 bits of each, the others zero.
KVTABLE_TARGET_AVX2 inline __m256i RoundEight(__m256 f, __m256i random, BFloat16) {
  const __m256i bits = _mm256_castps_si256(f);
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  const __m256i is_large = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(kLargestBits<BFloat16>));
  const __m256i is_nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i add = _mm256_blendv_epi8(_mm256_srli_epi32(random, 16), half, is_large);
  const __m256i sum = _mm256_blendv_epi8(_mm256_add_epi32(bits, add),
                                         _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), is_nan);
  return _mm256_srli_epi32(sum, 16);
}

KVTABLE_TARGET_AVX2 inline __m256i RoundEight(__m256 f, __m256i random, Float16) {
  const __m256i bits = _mm256_castps_si256(f);
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  const __m256i normal =
      _mm256_srli_epi32(_mm256_add_epi32(_mm256_sub_epi32(magnitude, _mm256_set1_epi32(112 << 23)),
                                         _mm256_srli_epi32(random, 19)),
                        13);
  const __m256i is_subnormal = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x38800000), magnitude);
  const __m256 multiple =
      _mm256_mul_ps(_mm256_castsi256_ps(_mm256_and_si256(magnitude, is_subnormal)), _mm256_set1_ps(0x1p24f));
  const __m256i whole = _mm256_cvttps_epi32(multiple);
  const __m256 rest = _mm256_sub_ps(multiple, _mm256_cvtepi32_ps(whole));
  const __m256 uniform =
      _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(random, 8)), _mm256_set1_ps(0x1p-24f));
  const __m256i up = _mm256_castps_si256(_mm256_cmp_ps(uniform, rest, _CMP_LT_OQ));  // -1 or 0
  const __m256i subnormal = _mm256_sub_epi32(whole, up);
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x8000));
  const __m256i rounded = _mm256_or_si256(_mm256_blendv_epi8(normal, subnormal, is_subnormal), sign);
  const __m256i is_large = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(kLargestBits<Float16>));
  const __m256i nearest = _mm256_cvtepu16_epi32(_mm256_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT));
  return _mm256_blendv_epi8(rounded, nearest, is_large);
}

template <class T>
KVTABLE_TARGET_AVX2 inline __m128i StochasticEight(__m256 f, __m256i counter) {
  const __m256i rounded = RoundEight(f, MixFour(counter), T{});
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0b1000));
}

template <class T>
KVTABLE_TARGET_AVX2 void StoreEightsStochastically(const float* from, int64_t n, uint64_t stream,
                                                   uint64_t first_word, void* to) {
  alignas(32) static constexpr uint64_t kSteps[4] = {0, kWordStep, 2 * kWordStep, 3 * kWordStep};
  const uint64_t start = stream + (first_word + 1) * kWordStep;
  __m256i counter = _mm256_add_epi64(_mm256_set1_epi64x(static_cast<int64_t>(start)),
                                     _mm256_load_si256(reinterpret_cast<const __m256i*>(kSteps)));
  T* const y = static_cast<T*>(to);
  int64_t j = 0;
  for (; j + 8 <= n; j += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y + j),
                     StochasticEight<T>(_mm256_loadu_ps(from + j), counter));
    counter = _mm256_add_epi64(counter, _mm256_set1_epi64x(static_cast<int64_t>(4 * kWordStep)));
  }
  if (j == n) return;
  alignas(32) float rest[8] = {};
  alignas(16) T rounded[8];
  std::memcpy(rest, from + j, static_cast<size_t>(n - j) * sizeof(float));
  _mm_store_si128(reinterpret_cast<__m128i*>(rounded), StochasticEight<T>(_mm256_load_ps(rest), counter));
  std::memcpy(y + j, rounded, static_cast<size_t>(n - j) * sizeof(T));
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 takes its own undefined registers for ours

// Sixteen elements are stored as one vector, because a rule of this instruction set loads them as one: from two smaller
// stores the CPU would not pass them on until both are in the cache.

KVTABLE_TARGET_AVX512 inline __m512 LoadSixteen(const BFloat16* x) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
KVTABLE_TARGET_AVX512 inline __m512 LoadSixteen(const Float16* x) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}

template <class T, auto kRest>
KVTABLE_TARGET_AVX512 void LoadSixteens(const void* from, int64_t n, float* to) {
  const T* const x = static_cast<const T*>(from);
  int64_t j = 0;
  for (; j + 16 <= n; j += 16) _mm512_storeu_ps(to + j, LoadSixteen(x + j));
  if (j != n) kRest(x + j, n - j, to + j);
}

template <class T, auto kRest>
KVTABLE_TARGET_AVX512 void AccumulateSixteens(const void* from, int64_t n, float* to) {
  const T* const x = static_cast<const T*>(from);
  int64_t j = 0;
  for (; j + 16 <= n; j += 16) {
    _mm512_storeu_ps(to + j, _mm512_add_ps(_mm512_loadu_ps(to + j), LoadSixteen(x + j)));
  }
  if (j != n) kRest(x + j, n - j, to + j);
}

KVTABLE_TARGET_AVX512 inline __m512i MixEight(__m512i x) {  // Mix64 of each
  x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 30)),
                         _mm512_set1_epi64(static_cast<int64_t>(0xbf58476d1ce4e5b9ULL)));
  x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 27)),
                         _mm512_set1_epi64(static_cast<int64_t>(0x94d049bb133111ebULL)));
  return _mm512_xor_si512(x, _mm512_srli_epi64(x, 31));
}

// In the low 16 bits of each, the others zero.
KVTABLE_TARGET_AVX512 inline __m512i RoundSixteen(__m512 f, __m512i random, BFloat16) {
  const __m512i bits = _mm512_castps_si512(f);
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  const __mmask16 is_large = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(kLargestBits<BFloat16>));
  const __mmask16 is_nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  const __m512i add = _mm512_mask_mov_epi32(_mm512_srli_epi32(random, 16), is_large, half);
  const __m512i sum = _mm512_mask_mov_epi32(_mm512_add_epi32(bits, add), is_nan,
                                            _mm512_or_si512(bits, _mm512_set1_epi32(0x400000)));
  return _mm512_srli_epi32(sum, 16);
}

KVTABLE_TARGET_AVX512 inline __m512i RoundSixteen(__m512 f, __m512i random, Float16) {
  const __m512i bits = _mm512_castps_si512(f);
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  const __m512i normal =
      _mm512_srli_epi32(_mm512_add_epi32(_mm512_sub_epi32(magnitude, _mm512_set1_epi32(112 << 23)),
                                         _mm512_srli_epi32(random, 19)),
                        13);
  const __mmask16 is_subnormal = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(0x38800000));
  const __m512 multiple =
      _mm512_maskz_mul_ps(is_subnormal, _mm512_castsi512_ps(magnitude), _mm512_set1_ps(0x1p24f));
  const __m512i whole = _mm512_cvttps_epi32(multiple);
  const __m512 rest = _mm512_sub_ps(multiple, _mm512_cvtepi32_ps(whole));
  const __m512 uniform =
      _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(random, 8)), _mm512_set1_ps(0x1p-24f));
  const __mmask16 up = _mm512_cmp_ps_mask(uniform, rest, _CMP_LT_OQ);
  const __m512i subnormal = _mm512_mask_add_epi32(whole, up, whole, _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_or_si512(_mm512_mask_mov_epi32(normal, is_subnormal, subnormal),
                      _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x8000)));
  const __mmask16 is_large = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(kLargestBits<Float16>));
  const __m512i nearest = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT));
  return _mm512_mask_mov_epi32(rounded, is_large, nearest);
}

template <class T>
KVTABLE_TARGET_AVX512 void StoreSixteensStochastically(const float* from, int64_t n, uint64_t stream,
                                                       uint64_t first_word, void* to) {
  alignas(64) static constexpr uint64_t kSteps[8] = {
      0, kWordStep, 2 * kWordStep, 3 * kWordStep, 4 * kWordStep, 5 * kWordStep, 6 * kWordStep, 7 * kWordStep};
  __m512i counter =
      _mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(stream + (first_word + 1) * kWordStep)),
                       _mm512_load_si512(kSteps));
  T* const y = static_cast<T*>(to);
  for (int64_t j = 0; j < n; j += 16) {
    const __mmask16 there = static_cast<__mmask16>(n - j < 16 ? (1 << (n - j)) - 1 : 0xffff);
    const __m512i rounded = RoundSixteen(_mm512_maskz_loadu_ps(there, from + j), MixEight(counter), T{});
    _mm256_mask_storeu_epi16(y + j, there, _mm512_cvtepi32_epi16(rounded));
    counter = _mm512_add_epi64(counter, _mm512_set1_epi64(static_cast<int64_t>(8 * kWordStep)));
  }
}
#pragma GCC diagnostic pop
#endif

#if defined(__x86_64__)
RowConversion BestAvx2(Float16) {
  return {LoadFloat16, AccumulateFloat16, StoreFloat16, StoreEightsStochastically<Float16>};
}
RowConversion BestAvx2(BFloat16) {
  RowConversion best = Avx2<BFloat16>::All();
  best.store_stochastically = StoreEightsStochastically<BFloat16>;
  return best;
}

RowConversion BestAvx512(Float16) {
  return {LoadSixteens<Float16, LoadFloat16>, AccumulateSixteens<Float16, AccumulateFloat16>, StoreFloat16,
          StoreSixteensStochastically<Float16>};
}
RowConversion BestAvx512(BFloat16) {
  using Simple = Avx512<BFloat16>;
  return {LoadSixteens<BFloat16, Simple::Load>, AccumulateSixteens<BFloat16, Simple::Accumulate>,
          Simple::Store, StoreSixteensStochastically<BFloat16>};
}
#endif

template <class T>
RowConversion Best() {
#if defined(__x86_64__)
  switch (BestInstructionSet()) {
    case InstructionSet::kAvx512:
      return BestAvx512(T{});
    case InstructionSet::kAvx2:
      return BestAvx2(T{});
    case InstructionSet::kBaseline:
      break;
  }
#endif
  return Baseline<T>::All();
}

}  // namespace

RowConversion BestRowConversion(ValueType type) {
  return type == ValueType::kBFloat16 ? Best<BFloat16>() : Best<Float16>();
}

decltype(RowConversion::load) WidenRow(ValueType type) {
  if (type != ValueType::kFloat16 && type != ValueType::kBFloat16) {
    throw Error(ErrorCode::kInvalidArgument, "Only rows of float16 and bfloat16 can be widened to float32.");
  }
  return BestRowConversion(type).load;
}

}  // namespace kvtable
