#include "training/add_rows.h"

#include <algorithm>
#include <type_traits>

#include "base/always_inline.h"
#include "base/instruction_set.h"
#include "training/sum_rows.h"
#include "values/row_conversion.h"

namespace kvtable {
namespace {

template <class C, int kBytes>
struct VectorOf {
  typedef C Type __attribute__((vector_size(kBytes), aligned(alignof(C)), may_alias));
};

// The rows to be added up, as AddColumns asks for them. `Ask` asks memory for some bytes of a later row.
template <class C>
struct PointedRows {
  const char* const* rows;
  KVTABLE_ALWAYS_INLINE const C* operator()(int64_t i) const { return reinterpret_cast<const C*>(rows[i]); }
  template <int kBytes>
  KVTABLE_ALWAYS_INLINE void Ask(int64_t, int64_t) const {}
};
template <class C>
struct IndexedRows {
  const C* rows;
  const RowIndices& indices;
  int64_t dim;
  KVTABLE_ALWAYS_INLINE const C* operator()(int64_t i) const {
    return rows + int64_t{indices.indices[i]} * dim;
  }
  template <int kBytes>
  KVTABLE_ALWAYS_INLINE void Ask(int64_t i, int64_t column) const {
    const C* const at = (*this)(std::min(i + indices.ahead, indices.last)) + column;
#pragma GCC unroll 4
    for (int byte = 0; byte < kBytes; byte += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(at) + byte);
  }
};

// Adds up some columns of all rows, in registers; returns the first column after them.
template <class C, int kBytes, int kVectors, bool kWeighted, class Rows>
KVTABLE_ALWAYS_INLINE inline int64_t AddColumns(const Rows& rows, const C* weights, int64_t n, int64_t column,
                                                bool fresh, C* sum) {
  using Vector = typename VectorOf<C, kBytes>::Type;
  Vector* const to = reinterpret_cast<Vector*>(sum + column);
  Vector sums[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) sums[v] = fresh ? Vector{} : to[v];
  for (int64_t i = 0; i < n; ++i) {
    rows.template Ask<kVectors * kBytes>(i, column);
    const Vector* const row = reinterpret_cast<const Vector*>(rows(i) + column);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[v] += kWeighted ? weights[i] * row[v] : row[v];
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) to[v] = sums[v];
  return column + kVectors * kBytes / int64_t{sizeof(C)};
}

// `kBytes` are those of the CPU's registers.
template <class C, int kBytes, bool kWeighted, class Rows>
KVTABLE_ALWAYS_INLINE inline void AddAll(const Rows& rows, const C* weights, int64_t n, int64_t dim,
                                         bool fresh, C* sum) {
  constexpr int64_t kEach = kBytes / int64_t{sizeof(C)};
  int64_t j = 0;
  while (j + 4 * kEach <= dim) j = AddColumns<C, kBytes, 4, kWeighted>(rows, weights, n, j, fresh, sum);
  if (j + 2 * kEach <= dim) j = AddColumns<C, kBytes, 2, kWeighted>(rows, weights, n, j, fresh, sum);
  if (j + kEach <= dim) j = AddColumns<C, kBytes, 1, kWeighted>(rows, weights, n, j, fresh, sum);
  if constexpr (kBytes > 32) {
    if (j + kEach / 2 <= dim) j = AddColumns<C, 32, 1, kWeighted>(rows, weights, n, j, fresh, sum);
  }
  if constexpr (kBytes > 16) {
    if (j + 16 / int64_t{sizeof(C)} <= dim)
      j = AddColumns<C, 16, 1, kWeighted>(rows, weights, n, j, fresh, sum);
  }
  for (; j < dim; ++j) {
    C total = fresh ? 0 : sum[j];
    for (int64_t i = 0; i < n; ++i) total += kWeighted ? weights[i] * rows(i)[j] : rows(i)[j];
    sum[j] = total;
  }
}

// Whether a row is begun or added to is no branch: nobody could foresee it.
template <class C, int kBytes, int kVectors>
KVTABLE_ALWAYS_INLINE inline int64_t AddColumnsTo(const C* row, const uint32_t* numbers, int64_t n,
                                                  int64_t dim, int64_t column, uint32_t begun, uint32_t* end,
                                                  C* sums) {
  using Bits = std::conditional_t<sizeof(C) == 4, int32_t, int64_t>;
  using Vector = typename VectorOf<C, kBytes>::Type;
  using Mask = typename VectorOf<Bits, kBytes>::Type;
  const Vector* const from = reinterpret_cast<const Vector*>(row + column);
  Vector adds[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) adds[v] = from[v];
  uint32_t next = begun;
  for (int64_t i = 0; i < n; ++i) {
    const bool first = numbers[i] == next;
    next += first ? 1 : 0;
    const Mask begin = Mask{} - static_cast<Bits>(first ? 1 : 0);
    Vector* const to = reinterpret_cast<Vector*>(sums + int64_t{numbers[i]} * dim + column);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Vector sum = to[v] + adds[v];
      to[v] = reinterpret_cast<Vector>((reinterpret_cast<Mask>(adds[v]) & begin) |
                                       (reinterpret_cast<Mask>(sum) & ~begin));
    }
  }
  *end = next;
  return column + kVectors * kBytes / int64_t{sizeof(C)};
}

template <class C, int kBytes>
KVTABLE_ALWAYS_INLINE inline void AddAllTo(const C* row, const uint32_t* numbers, int64_t n, int64_t dim,
                                           uint32_t* begun, C* sums) {
  constexpr int64_t kEach = kBytes / int64_t{sizeof(C)};
  uint32_t end = *begun;
  int64_t j = 0;
  while (j + 4 * kEach <= dim) j = AddColumnsTo<C, kBytes, 4>(row, numbers, n, dim, j, *begun, &end, sums);
  if (j + 2 * kEach <= dim) j = AddColumnsTo<C, kBytes, 2>(row, numbers, n, dim, j, *begun, &end, sums);
  if (j + kEach <= dim) j = AddColumnsTo<C, kBytes, 1>(row, numbers, n, dim, j, *begun, &end, sums);
  if constexpr (kBytes > 32) {
    if (j + kEach / 2 <= dim) j = AddColumnsTo<C, 32, 1>(row, numbers, n, dim, j, *begun, &end, sums);
  }
  if constexpr (kBytes > 16) {
    if (j + 16 / int64_t{sizeof(C)} <= dim)
      j = AddColumnsTo<C, 16, 1>(row, numbers, n, dim, j, *begun, &end, sums);
  }
  for (; j < dim; ++j) {
    end = *begun;
    for (int64_t i = 0; i < n; ++i) {
      C* const to = sums + int64_t{numbers[i]} * dim + j;
      const bool first = numbers[i] == end;
      *to = first ? row[j] : *to + row[j];
      end += first ? 1 : 0;
    }
  }
  *begun = end;
}

template <class C, int kBytes, int kVectors>
KVTABLE_ALWAYS_INLINE inline int64_t AddColumnsAt(const C* row, const int64_t* places, int64_t n,
                                                  int64_t column, C* sums) {
  using Vector = typename VectorOf<C, kBytes>::Type;
  const Vector* const from = reinterpret_cast<const Vector*>(row + column);
  Vector adds[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) adds[v] = from[v];
  for (int64_t i = 0; i < n; ++i) {
    Vector* const to = reinterpret_cast<Vector*>(sums + places[i] + column);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) to[v] += adds[v];
  }
  return column + kVectors * kBytes / int64_t{sizeof(C)};
}

template <class C, int kBytes>
KVTABLE_ALWAYS_INLINE inline void AddAllAt(const C* row, const int64_t* places, int64_t n, int64_t dim,
                                           C* sums) {
  constexpr int64_t kEach = kBytes / int64_t{sizeof(C)};
  int64_t j = 0;
  while (j + 4 * kEach <= dim) j = AddColumnsAt<C, kBytes, 4>(row, places, n, j, sums);
  if (j + 2 * kEach <= dim) j = AddColumnsAt<C, kBytes, 2>(row, places, n, j, sums);
  if (j + kEach <= dim) j = AddColumnsAt<C, kBytes, 1>(row, places, n, j, sums);
  if constexpr (kBytes > 32) {
    if (j + kEach / 2 <= dim) j = AddColumnsAt<C, 32, 1>(row, places, n, j, sums);
  }
  if constexpr (kBytes > 16) {
    if (j + 16 / int64_t{sizeof(C)} <= dim) j = AddColumnsAt<C, 16, 1>(row, places, n, j, sums);
  }
  for (; j < dim; ++j) {
    for (int64_t i = 0; i < n; ++i) sums[places[i] + j] += row[j];
  }
}

// The functions of one instruction set. `attributes` may be empty.
#define KVTABLE_ADD_ROWS(Set, attributes, kBytes)                                                            \
  template <class C>                                                                                         \
  struct Set {                                                                                               \
    template <bool kWeighted>                                                                                \
    attributes static void Add(const char* const* rows, const void* weights, int64_t n, int64_t dim,         \
                               bool fresh, void* sum) {                                                      \
      AddAll<C, kBytes, kWeighted>(PointedRows<C>{rows}, static_cast<const C*>(weights), n, dim, fresh,      \
                                   static_cast<C*>(sum));                                                    \
    }                                                                                                        \
    attributes static void AddIndexed(const void* rows, const RowIndices& indices, int64_t dim, void* sum) { \
      const IndexedRows<C> typed{static_cast<const C*>(rows), indices, dim};                                 \
      AddAll<C, kBytes, false>(typed, static_cast<const C*>(nullptr), indices.n, dim, false,                 \
                               static_cast<C*>(sum));                                                        \
    }                                                                                                        \
    attributes static void AddTo(const void* row, const uint32_t* numbers, int64_t n, int64_t dim,           \
                                 uint32_t* begun, void* sums) {                                              \
      AddAllTo<C, kBytes>(static_cast<const C*>(row), numbers, n, dim, begun, static_cast<C*>(sums));        \
    }                                                                                                        \
    attributes static void AddAt(const void* row, const int64_t* places, int64_t n, int64_t dim,             \
                                 void* sums) {                                                               \
      AddAllAt<C, kBytes>(static_cast<const C*>(row), places, n, dim, static_cast<C*>(sums));                \
    }                                                                                                        \
    static AddFunctions All() { return {Add<false>, Add<true>, AddIndexed, AddTo, AddAt}; }                  \
  }

struct AddFunctions {
  AddRows add;
  AddRows add_weighted;
  AddIndexedRows add_indexed;
  AddToRows add_to;
  AddToPlaces add_at;
};

KVTABLE_ADD_ROWS(Baseline, , 16);
#if defined(__x86_64__)
KVTABLE_ADD_ROWS(Avx2, KVTABLE_TARGET_AVX2, 32);
KVTABLE_ADD_ROWS(Avx512, KVTABLE_TARGET_AVX512, 64);
#endif

template <class C>
AddFunctions Best() {
#if defined(__x86_64__)
  switch (BestInstructionSet()) {
    case InstructionSet::kAvx512:
      return Avx512<C>::All();
    case InstructionSet::kAvx2:
      return Avx2<C>::All();
    case InstructionSet::kBaseline:
      break;
  }
#endif
  return Baseline<C>::All();
}

// 16-bit rows, converted one by one.
template <class T, bool kWeighted>
void AddConverted(const char* const* rows, const void* weights, int64_t n, int64_t dim, bool fresh,
                  void* sum) {
  static const RowConversion conversion =
      BestRowConversion(std::is_same_v<T, BFloat16> ? ValueType::kBFloat16 : ValueType::kFloat16);
  float* const to = static_cast<float*>(sum);
  if (fresh) std::fill(to, to + dim, 0.0f);
  for (int64_t i = 0; i < n; ++i) {
    if constexpr (kWeighted) {
      AddScaledRow(reinterpret_cast<const T*>(rows[i]), static_cast<const float*>(weights)[i], dim, to);
    } else {
      conversion.accumulate(rows[i], dim, to);
    }
  }
}

}  // namespace

AddRows BestAddRows(ValueType type, bool weighted) {
  AddRows best = nullptr;
  VisitValueType(type, [&](auto t) {
    using T = decltype(t);
    if constexpr (std::is_same_v<T, ComputeOf<T>>) {
      best = weighted ? Best<T>().add_weighted : Best<T>().add;
    } else {
      best = weighted ? AddConverted<T, true> : AddConverted<T, false>;
    }
  });
  return best;
}

AddIndexedRows BestAddIndexedRows(bool is_double) {
  return is_double ? Best<double>().add_indexed : Best<float>().add_indexed;
}

AddToRows BestAddToRows(bool is_double) { return is_double ? Best<double>().add_to : Best<float>().add_to; }

AddToPlaces BestAddToPlaces(bool is_double) {
  return is_double ? Best<double>().add_at : Best<float>().add_at;
}

}  // namespace kvtable
