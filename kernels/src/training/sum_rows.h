// Sums of rows, in the type that the row's elements are computed with.
#pragma once

#include <cstdint>

#include "values/elements.h"

namespace kvtable {

template <class T>
using ComputeOf = typename Element<T>::Compute;

// sum += row
template <class T>
inline void AddRow(const T* __restrict row, int64_t dim, ComputeOf<T>* __restrict sum) {
  for (int64_t j = 0; j < dim; ++j) sum[j] += Element<T>::Load(row[j]);
}

// sum += scale x row
template <class T>
inline void AddScaledRow(const T* __restrict row, ComputeOf<T> scale, int64_t dim,
                         ComputeOf<T>* __restrict sum) {
  for (int64_t j = 0; j < dim; ++j) sum[j] += scale * Element<T>::Load(row[j]);
}

// sum = scale x row
template <class T>
inline void StoreScaledRow(const T* __restrict row, ComputeOf<T> scale, int64_t dim,
                           ComputeOf<T>* __restrict sum) {
  for (int64_t j = 0; j < dim; ++j) sum[j] = scale * Element<T>::Load(row[j]);
}

// out = sum / divisor, or zeros where that is zero.
template <class T>
inline void StoreQuotient(const ComputeOf<T>* __restrict sum, ComputeOf<T> divisor, int64_t dim,
                          T* __restrict out) {
  if (divisor == 1) {
    for (int64_t j = 0; j < dim; ++j) out[j] = Element<T>::Store(sum[j]);
  } else if (divisor == 0) {
    for (int64_t j = 0; j < dim; ++j) out[j] = Element<T>::Store(0);
  } else {
    for (int64_t j = 0; j < dim; ++j) out[j] = Element<T>::Store(sum[j] / divisor);
  }
}

template <class T>
inline ComputeOf<T> DotRows(const T* __restrict a, const T* __restrict b, int64_t dim) {
  ComputeOf<T> total = 0;
  for (int64_t j = 0; j < dim; ++j) total += Element<T>::Load(a[j]) * Element<T>::Load(b[j]);
  return total;
}

}  // namespace kvtable
