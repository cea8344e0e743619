#include "table/search_buckets.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/instruction_set.h"

namespace kvtable {
namespace {

constexpr int64_t kBucketsAhead = 16;

// By instructions that compare several keys at once. `hits` has a bit for each of a bucket's keys that is `key`, whether it is valid or not.
#define KVTABLE_SEARCH_HOMES(Name, attributes, hits)                                                  \
  attributes void Name(const uint64_t* keys, const Bucket* const* homes, int64_t n, uint32_t* rows) { \
    for (int64_t i = 0; i < std::min(kBucketsAhead, n); ++i) __builtin_prefetch(homes[i]);            \
    for (int64_t i = 0; i < n; ++i) {                                                                 \
      if (i + kBucketsAhead < n) __builtin_prefetch(homes[i + kBucketsAhead]);                        \
      const uint64_t key = keys[i];                                                                   \
      const Bucket* const bucket = homes[i];                                                          \
      const uint32_t valid = (hits) & ((1u << bucket->count) - 1);                                    \
      rows[i] = valid != 0 ? bucket->rows[__builtin_ctz(valid)] : BucketIndex::kNoRow;                \
    }                                                                                                 \
  }

void SearchBaseline(const uint64_t* keys, const Bucket* const* homes, int64_t n, uint32_t* rows) {
  for (int64_t i = 0; i < std::min(kBucketsAhead, n); ++i) __builtin_prefetch(homes[i]);
  for (int64_t i = 0; i < n; ++i) {
    if (i + kBucketsAhead < n) __builtin_prefetch(homes[i + kBucketsAhead]);
    rows[i] = BucketIndex::Match(keys[i], homes[i]);
  }
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
