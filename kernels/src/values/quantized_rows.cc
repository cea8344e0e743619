#include "kvtable/quantized_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/always_inline.h"
#include "base/instruction_set.h"
#include "values/float16.h"

namespace kvtable {
namespace {

constexpr int64_t kHead = 6;  // offset and scale
constexpr int64_t kLanes = 16;
constexpr float kSmallestNormal = 0x1p-126f;
// Adding it rounds a number below 2^22 to the nearest whole one, ties to even, which then is in the low bits.
constexpr float kRounds = 0x1.8p23f;

KVTABLE_ALWAYS_INLINE inline float At(const void* row, int64_t i) {
  float x;
  std::memcpy(&x, static_cast<const uint8_t*>(row) + i * 4, sizeof(x));
  return x;
}

// The scale, whose bits below those of a bfloat16 are zeros, is at least the row's width in `steps`.
struct Grid {
  float offset;
  float scale;
};

KVTABLE_ALWAYS_INLINE inline Grid GridOf(const void* row, int64_t dim, float steps) {
  // Side by side, so that the compiler uses whole vectors.
  float lows[kLanes], highs[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) lows[lane] = highs[lane] = At(row, 0);
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const float x = At(row, i + lane);
      lows[lane] = x < lows[lane] ? x : lows[lane];
      highs[lane] = x > highs[lane] ? x : highs[lane];
    }
  }
  for (; i < dim; ++i) {
    const float x = At(row, i);
    lows[0] = std::min(lows[0], x);
    highs[0] = std::max(highs[0], x);
  }
  float low = lows[0], high = highs[0];
  for (int64_t lane = 1; lane < kLanes; ++lane) {
    low = std::min(low, lows[lane]);
    high = std::max(high, highs[lane]);
  }
  // Denormal numbers are zeros to who computes with them in a graph, so none is written. This makes -0 a 0, too.
  if (std::fabs(low) < kSmallestNormal) low = 0;
  const double width = static_cast<double>(high) - static_cast<double>(low);
  if (!(width > 0)) return {low, 0};
  const auto nearest = static_cast<float>(width / static_cast<double>(steps));
  const float scale = FloatOf((BitsOf(nearest) + 0xffffu) & 0xffff0000u);
  return {low, std::max(scale, kSmallestNormal)};
}

KVTABLE_ALWAYS_INLINE inline uint8_t CodeOf(float x, const Grid& grid, float steps) {
  float code = (x - grid.offset) / grid.scale;
  code = code < steps ? code : steps;
  code = code > 0.0f ? code : 0.0f;
  return static_cast<uint8_t>(BitsOf(code + kRounds) - BitsOf(kRounds));
}

KVTABLE_ALWAYS_INLINE inline void WriteHead(const Grid& grid, void* to) {
  const auto scale = static_cast<uint16_t>(BitsOf(grid.scale) >> 16);
  std::memcpy(to, &grid.offset, 4);
  std::memcpy(static_cast<uint8_t*>(to) + 4, &scale, 2);
}

template <class Code>
KVTABLE_ALWAYS_INLINE inline void WriteBytes(const void* row, int64_t dim, uint8_t* __restrict codes,
                                             const Code& code_of) {
  for (int64_t i = 0; i < dim; ++i) codes[i] = code_of(At(row, i));
}

// Byte i has number i in its low half, and the number half a row behind it in its high half.
template <class Code>
KVTABLE_ALWAYS_INLINE inline void WriteHalves(const void* row, int64_t dim, uint8_t* __restrict codes,
                                              const Code& code_of) {
  const int64_t half = (dim + 1) / 2;
  for (int64_t i = 0; i < dim - half; ++i) {
    codes[i] = static_cast<uint8_t>(code_of(At(row, i)) | code_of(At(row, i + half)) << 4);
  }
  if (dim % 2 != 0) codes[half - 1] = code_of(At(row, half - 1));
}

KVTABLE_ALWAYS_INLINE inline void EncodeInt8(const void* from, int64_t dim, void* to) {
  constexpr float kSteps = 255;
  const Grid grid = GridOf(from, dim, kSteps);
  WriteHead(grid, to);
  auto* const codes = static_cast<uint8_t*>(to) + kHead;
  if (grid.scale == 0) {
    std::memset(codes, 0, static_cast<size_t>(dim));
  } else {
    WriteBytes(from, dim, codes, [&](float x) KVTABLE_ALWAYS_INLINE { return CodeOf(x, grid, kSteps); });
  }
}

KVTABLE_ALWAYS_INLINE inline void EncodeInt4(const void* from, int64_t dim, void* to) {
  constexpr float kSteps = 15;
  const Grid grid = GridOf(from, dim, kSteps);
  WriteHead(grid, to);
  auto* const codes = static_cast<uint8_t*>(to) + kHead;
  if (grid.scale == 0) {
    std::memset(codes, 0, static_cast<size_t>((dim + 1) / 2));
  } else {
    WriteHalves(from, dim, codes, [&](float x) KVTABLE_ALWAYS_INLINE { return CodeOf(x, grid, kSteps); });
  }
}

struct Head {
  float offset;
  float scale;
};

KVTABLE_ALWAYS_INLINE inline Head ReadHead(const void* from) {
  Head head;
  uint16_t scale;
  std::memcpy(&head.offset, from, 4);
  std::memcpy(&scale, static_cast<const uint8_t*>(from) + 4, 2);
  head.scale = ToFloat(BFloat16{scale});
  return head;
}

KVTABLE_ALWAYS_INLINE inline void DecodeInt8(const void* from, int64_t dim, float* __restrict to) {
  const Head head = ReadHead(from);
  const auto* const codes = static_cast<const uint8_t*>(from) + kHead;
  for (int64_t i = 0; i < dim; ++i) to[i] = head.offset + head.scale * static_cast<float>(codes[i]);
}

KVTABLE_ALWAYS_INLINE inline void DecodeInt4(const void* from, int64_t dim, float* __restrict to) {
  const Head head = ReadHead(from);
  const auto* const codes = static_cast<const uint8_t*>(from) + kHead;
  const int64_t half = (dim + 1) / 2;
  for (int64_t i = 0; i < half; ++i) to[i] = head.offset + head.scale * static_cast<float>(codes[i] & 15);
  for (int64_t i = half; i < dim; ++i) {
    to[i] = head.offset + head.scale * static_cast<float>(codes[i - half] >> 4);
  }
}

KVTABLE_ALWAYS_INLINE inline void DecodeScaled(const void* from, int64_t dim, float* __restrict to) {
  float scale;
  std::memcpy(&scale, from, sizeof(scale));
  const auto* const elements = static_cast<const int8_t*>(from) + sizeof(scale);
  for (int64_t i = 0; i < dim; ++i) to[i] = scale * static_cast<float>(elements[i]);
}

struct Sums {
  double products[kLanes / 2], before[kLanes / 2], after[kLanes / 2], errors[kLanes / 2], largest[kLanes / 2];
};

KVTABLE_ALWAYS_INLINE inline void AddLoss(const float* before, const float* after, int64_t count,
                                          Sums* sums) {
  for (int64_t lane = 0; lane < count; ++lane) {
    const double a = before[lane], b = after[lane];
    const double error = std::fabs(a - b);
    sums->products[lane] += a * b;
    sums->before[lane] += a * a;
    sums->after[lane] += b * b;
    sums->errors[lane] += error;
    sums->largest[lane] = error > sums->largest[lane] ? error : sums->largest[lane];
  }
}

KVTABLE_ALWAYS_INLINE inline void MeasureLoss(const float* before, const float* after, int64_t rows,
                                              int64_t dim, RowLoss* loss) {
  constexpr int64_t kSums = kLanes / 2;
  for (int64_t row = 0; row < rows; ++row, before += dim, after += dim) {
    Sums sums{};
    int64_t i = 0;
    for (; i + kSums <= dim; i += kSums) AddLoss(before + i, after + i, kSums, &sums);
    AddLoss(before + i, after + i, dim - i, &sums);
    double products = 0, squares = 0, squares_after = 0, errors = 0, largest = 0;
    for (int64_t lane = 0; lane < kSums; ++lane) {
      products += sums.products[lane];
      squares += sums.before[lane];
      squares_after += sums.after[lane];
      errors += sums.errors[lane];
      largest = std::max(largest, sums.largest[lane]);
    }
    // Squares of float32 are finite in double.
    if (!std::isfinite(squares) || !std::isfinite(squares_after)) continue;
    double cosine = squares == 0 && squares_after == 0 ? 1 : 0;
    if (squares > 0 && squares_after > 0) {
      cosine = std::min(1.0, products / (std::sqrt(squares) * std::sqrt(squares_after)));
    }
    ++loss->rows;
    loss->errors += errors;
    loss->largest_error = std::max(loss->largest_error, largest);
    loss->cosines += cosine;
    loss->least_cosine = std::min(loss->least_cosine, cosine);
  }
}

// `attributes` may be empty.
#define KVTABLE_QUANTIZED_ROWS(Set, attributes)                                                              \
  struct Set {                                                                                               \
    attributes static void Encode8(const void* from, int64_t dim, void* to) { EncodeInt8(from, dim, to); }   \
    attributes static void Encode4(const void* from, int64_t dim, void* to) { EncodeInt4(from, dim, to); }   \
    attributes static void Decode8(const void* from, int64_t dim, float* to) { DecodeInt8(from, dim, to); }  \
    attributes static void Decode4(const void* from, int64_t dim, float* to) { DecodeInt4(from, dim, to); }  \
    attributes static void Scaled(const void* from, int64_t dim, float* to) { DecodeScaled(from, dim, to); } \
    attributes static void Loss(const float* before, const float* after, int64_t rows, int64_t dim,          \
                                RowLoss* to) {                                                               \
      MeasureLoss(before, after, rows, dim, to);                                                             \
    }                                                                                                        \
  }

KVTABLE_QUANTIZED_ROWS(Baseline, );
#if defined(__x86_64__)
KVTABLE_QUANTIZED_ROWS(Avx2, KVTABLE_TARGET_AVX2);
#endif

bool HasAvx2() { return BestInstructionSet() != InstructionSet::kBaseline; }

}  // namespace

int64_t QuantizedRowBytes(RowForm form, int64_t dim) {
  if (form == RowForm::kScaled) return 4 + dim;
  return kHead + (form == RowForm::kInt4 ? (dim + 1) / 2 : dim);
}

bool CanQuantize(const void* row, int64_t dim) {
  float low = At(row, 0), high = low;
  for (int64_t i = 0; i < dim; ++i) {
    const float x = At(row, i);
    if (!std::isfinite(x)) return false;
    low = std::min(low, x);
    high = std::max(high, x);
  }
  return high - low <= kWidestRow;
}

RowEncode BestRowEncode(RowForm form) {
  const bool halves = form == RowForm::kInt4;
#if defined(__x86_64__)
  if (HasAvx2()) return halves ? Avx2::Encode4 : Avx2::Encode8;
#endif
  return halves ? Baseline::Encode4 : Baseline::Encode8;
}

RowDecode BestRowDecode(RowForm form) {
#if defined(__x86_64__)
  if (HasAvx2()) {
    return form == RowForm::kInt8 ? Avx2::Decode8 : form == RowForm::kInt4 ? Avx2::Decode4 : Avx2::Scaled;
  }
#endif
  return form == RowForm::kInt8   ? Baseline::Decode8
         : form == RowForm::kInt4 ? Baseline::Decode4
                                  : Baseline::Scaled;
}

RowLoss LossOfRows(const float* before, const float* after, int64_t rows, int64_t dim) {
  RowLoss loss;
#if defined(__x86_64__)
  if (HasAvx2()) {
    Avx2::Loss(before, after, rows, dim, &loss);
    return loss;
  }
#endif
  Baseline::Loss(before, after, rows, dim, &loss);
  return loss;
}

}  // namespace kvtable
