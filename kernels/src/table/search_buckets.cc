#include "table/search_buckets.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/always_inline.h"
#include "base/instruction_set.h"

namespace kvtable {
namespace {

constexpr int64_t kBucketsAhead = 16;

template <class Match>
KVTABLE_ALWAYS_INLINE inline void SearchBy(const uint64_t* keys, const Bucket* const* homes, int64_t n,
                                           uint32_t* rows, const Match& match) {
  for (int64_t i = 0; i < std::min(kBucketsAhead, n); ++i) __builtin_prefetch(homes[i]);
  for (int64_t i = 0; i < n; ++i) {
    if (i + kBucketsAhead < n) __builtin_prefetch(homes[i + kBucketsAhead]);
    rows[i] = match(keys[i], homes[i]);
  }
}

void SearchBaseline(const uint64_t* keys, const Bucket* const* homes, int64_t n, uint32_t* rows) {
  SearchBy(keys, homes, n, rows, BucketIndex::Match);
}

#if defined(__x86_64__)
struct MatchAvx2 {
  KVTABLE_TARGET_AVX2 uint32_t operator()(uint64_t key, const Bucket* bucket) const {
    const __m256i four = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bucket->keys));
    const __m256i same = _mm256_cmpeq_epi64(four, _mm256_set1_epi64x(static_cast<int64_t>(key)));
    const uint32_t hits = static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(same))) |
                          static_cast<uint32_t>(bucket->keys[4] == key) << 4;
    const uint32_t valid = hits & ((1u << bucket->count) - 1);
    return valid != 0 ? bucket->rows[__builtin_ctz(valid)] : BucketIndex::kNoRow;
  }
};
struct MatchAvx512 {
  KVTABLE_TARGET_AVX512 uint32_t operator()(uint64_t key, const Bucket* bucket) const {
    const uint32_t hits =
        _mm512_cmpeq_epi64_mask(_mm512_loadu_si512(bucket), _mm512_set1_epi64(static_cast<int64_t>(key)));
    const uint32_t valid = hits & ((1u << bucket->count) - 1);
    return valid != 0 ? bucket->rows[__builtin_ctz(valid)] : BucketIndex::kNoRow;
  }
};
KVTABLE_TARGET_AVX2 void SearchAvx2(const uint64_t* keys, const Bucket* const* homes, int64_t n,
                                    uint32_t* rows) {
  SearchBy(keys, homes, n, rows, MatchAvx2{});
}
KVTABLE_TARGET_AVX512 void SearchAvx512(const uint64_t* keys, const Bucket* const* homes, int64_t n,
                                        uint32_t* rows) {
  SearchBy(keys, homes, n, rows, MatchAvx512{});
}
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
