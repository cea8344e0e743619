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

KVTABLE_ALWAYS_INLINE inline void PrefetchFirst(const BucketRef* homes, int64_t n) {
  for (int64_t i = 0; i < std::min(kAhead, n); ++i) __builtin_prefetch(homes[i].bucket());
}

KVTABLE_ALWAYS_INLINE inline void PrefetchAhead(const BucketRef* homes, int64_t i, int64_t n) {
  if (i + kAhead < n) __builtin_prefetch(homes[i + kAhead].bucket());
}

// Where a key is not at home it is most probably in the next bucket. Without a branch, as no processor foresees which.
KVTABLE_ALWAYS_INLINE inline void PrefetchNextOfMissed(BucketRef home, bool missed) {
  __builtin_prefetch(home.bucket() + (missed ? 1 : 0));
}

// By instructions that compare several keys at once. `hits` has a bit for each of a bucket's words that is of `hash`, whether
// it is valid or not.
#define KVTABLE_SEARCH_HOMES(Name, attributes, hits)                                                 \
  attributes int64_t Name(const uint64_t* hashes, const BucketRef* homes, int64_t n, uint32_t* rows, \
                          uint32_t* elsewhere) {                                                     \
    int64_t misses = 0;                                                                              \
    PrefetchFirst(homes, n);                                                                         \
    for (int64_t i = 0; i < n; ++i) {                                                                \
      PrefetchAhead(homes, i, n);                                                                    \
      const int64_t hash = static_cast<int64_t>(hashes[i]);                                          \
      const BucketRef home = homes[i];                                                               \
      const Bucket* const bucket = home.bucket();                                                    \
      const int64_t of_hash = static_cast<int64_t>(~home.row_mask());                                \
      const uint32_t valid = (hits) & ((1u << bucket->count()) - 1);                                 \
      rows[i] = valid != 0 ? home.Row(__builtin_ctz(valid)) : BucketIndex::kNoRow;                   \
      elsewhere[misses] = static_cast<uint32_t>(i);                                                  \
      misses += valid == 0 ? 1 : 0;                                                                  \
      PrefetchNextOfMissed(home, valid == 0);                                                        \
    }                                                                                                \
    return misses;                                                                                   \
  }

int64_t SearchBaseline(const uint64_t* hashes, const BucketRef* homes, int64_t n, uint32_t* rows,
                       uint32_t* elsewhere) {
  int64_t misses = 0;
  PrefetchFirst(homes, n);
  for (int64_t i = 0; i < n; ++i) {
    PrefetchAhead(homes, i, n);
    rows[i] = BucketIndex::Match(hashes[i], homes[i]);
    elsewhere[misses] = static_cast<uint32_t>(i);
    misses += rows[i] == BucketIndex::kNoRow ? 1 : 0;
    PrefetchNextOfMissed(homes[i], rows[i] == BucketIndex::kNoRow);
  }
  return misses;
}

#if defined(__x86_64__)
// Which four of a bucket's words, from `first` on, are of a hash.
KVTABLE_TARGET_AVX2 inline uint32_t HitsOfFour(const Bucket* bucket, int first, int64_t hash,
                                               int64_t of_hash) {
  const __m256i words = _mm256_load_si256(reinterpret_cast<const __m256i*>(bucket) + first / 4);
  const __m256i differ =
      _mm256_and_si256(_mm256_xor_si256(words, _mm256_set1_epi64x(hash)), _mm256_set1_epi64x(of_hash));
  return static_cast<uint32_t>(
      _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(differ, _mm256_setzero_si256()))));
}
KVTABLE_SEARCH_HOMES(SearchAvx2, KVTABLE_TARGET_AVX2,
                     HitsOfFour(bucket, 0, hash, of_hash) | HitsOfFour(bucket, 4, hash, of_hash) << 4)
KVTABLE_SEARCH_HOMES(SearchAvx512, KVTABLE_TARGET_AVX512,
                     uint32_t{_mm512_testn_epi64_mask(_mm512_xor_si512(_mm512_load_si512(bucket),
                                                                       _mm512_set1_epi64(hash)),
                                                      _mm512_set1_epi64(of_hash))})
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
