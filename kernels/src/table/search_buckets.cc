#include "table/search_buckets.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/always_inline.h"
#include "base/instruction_set.h"

namespace kvtable {
namespace {

// Who found the homes asked for them, into the second-level cache. Into the first, which has room for 10 to 16 lines on
// their way, they come just before they are read.
constexpr int64_t kAhead = 12;

KVTABLE_ALWAYS_INLINE inline void PrefetchFirst(const Bucket* const* homes, int64_t n) {
  for (int64_t i = 0; i < std::min(kAhead, n); ++i) __builtin_prefetch(homes[i]);
}

KVTABLE_ALWAYS_INLINE inline void PrefetchAhead(const Bucket* const* homes, int64_t i, int64_t n) {
  if (i + kAhead < n) __builtin_prefetch(homes[i + kAhead]);
}

// Where a key is not at home it is most probably in the next bucket. Without a branch, as no processor foresees which.
KVTABLE_ALWAYS_INLINE inline void PrefetchNextOfMissed(const Bucket* home, bool missed) {
  __builtin_prefetch(home + (missed ? 1 : 0));
}

// By instructions that compare several keys at once. `hits` has a bit for each of a bucket's keys that is `key`, whether it is valid or not.
#define KVTABLE_SEARCH_HOMES(Name, attributes, hits)                                                   \
  attributes int64_t Name(const uint64_t* keys, const Bucket* const* homes, int64_t n, uint32_t* rows, \
                          uint32_t* elsewhere) {                                                       \
    int64_t misses = 0;                                                                                \
    PrefetchFirst(homes, n);                                                                           \
    for (int64_t i = 0; i < n; ++i) {                                                                  \
      PrefetchAhead(homes, i, n);                                                                      \
      const uint64_t key = keys[i];                                                                    \
      const Bucket* const bucket = homes[i];                                                           \
      const uint32_t valid = (hits) & ((1u << bucket->count) - 1);                                     \
      rows[i] = valid != 0 ? bucket->rows[__builtin_ctz(valid)] : BucketIndex::kNoRow;                 \
      elsewhere[misses] = static_cast<uint32_t>(i);                                                    \
      misses += valid == 0 ? 1 : 0;                                                                    \
      PrefetchNextOfMissed(bucket, valid == 0);                                                        \
    }                                                                                                  \
    return misses;                                                                                     \
  }

int64_t SearchBaseline(const uint64_t* keys, const Bucket* const* homes, int64_t n, uint32_t* rows,
                       uint32_t* elsewhere) {
  int64_t misses = 0;
  PrefetchFirst(homes, n);
  for (int64_t i = 0; i < n; ++i) {
    PrefetchAhead(homes, i, n);
    rows[i] = BucketIndex::Match(keys[i], homes[i]);
    elsewhere[misses] = static_cast<uint32_t>(i);
    misses += rows[i] == BucketIndex::kNoRow ? 1 : 0;
    PrefetchNextOfMissed(homes[i], rows[i] == BucketIndex::kNoRow);
  }
  return misses;
}

#if defined(__x86_64__)
KVTABLE_SEARCH_HOMES(SearchAvx2, KVTABLE_TARGET_AVX2,
                     static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(
                         _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bucket->keys)),
                         _mm256_set1_epi64x(static_cast<int64_t>(key)))))) |
                         static_cast<uint32_t>(bucket->keys[4] == key) << 4)
KVTABLE_SEARCH_HOMES(SearchAvx512, KVTABLE_TARGET_AVX512,
                     uint32_t{_mm512_cmpeq_epi64_mask(_mm512_loadu_si512(bucket),
                                                      _mm512_set1_epi64(static_cast<int64_t>(key)))})
#endif

}  // namespace

SearchHomes BestSearchHomes() {
#if defined(__x86_64__)
  switch (BestInstructionSet()) {
    case InstructionSet::kAvx512:
      return SearchAvx512;
    case InstructionSet::kAvx2:
      return SearchAvx2;
    case InstructionSet::kBaseline:
      break;
  }
#endif
  return SearchBaseline;
}

}  // namespace kvtable
