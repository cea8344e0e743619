// Every 16-bit pattern survives a round trip, rounding goes to the nearest, ties to even, and rows are rounded
// stochastically as their elements one by one.
#include "values/float16.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "check.h"
#include "values/elements.h"
#include "values/random.h"
#include "values/row_conversion.h"
#include "values/stochastic_rounding.h"

namespace kvtable {
namespace {

void EveryPatternSurvivesARoundTrip() {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const Float16 half = {static_cast<uint16_t>(bits)};
    const BFloat16 brain = {static_cast<uint16_t>(bits)};
    if (std::isnan(ToFloat(half))) {
      CHECK(std::isnan(ToFloat(ToFloat16(ToFloat(half)))));
    } else {
      CHECK(ToFloat16(ToFloat(half)).bits == bits);
    }
    if (std::isnan(ToFloat(brain))) {
      CHECK(std::isnan(ToFloat(ToBFloat16(ToFloat(brain)))));
    } else {
      CHECK(ToBFloat16(ToFloat(brain)).bits == bits);
    }
  }
}

// Between two neighbours the middle goes to the even one, and whatever is off the middle to the nearer one.
void MiddlesGoToEven() {
  for (uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const double low = ToFloat(Float16{static_cast<uint16_t>(bits)});
    const double high = ToFloat(Float16{static_cast<uint16_t>(bits + 1)});
    const float middle = static_cast<float>((low + high) / 2);
    CHECK(ToFloat16(middle).bits == (bits % 2 == 0 ? bits : bits + 1));
    CHECK(ToFloat16(std::nextafter(middle, 0.0f)).bits == bits);
    CHECK(ToFloat16(std::nextafter(middle, 1e9f)).bits == bits + 1);
  }
  for (uint32_t bits = 0; bits < 0x7f7f; ++bits) {
    const float middle = FloatOf(bits << 16 | 0x8000u);
    CHECK(ToBFloat16(middle).bits == (bits % 2 == 0 ? bits : bits + 1));
    CHECK(ToBFloat16(FloatOf(bits << 16 | 0x7fffu)).bits == bits);
    CHECK(ToBFloat16(FloatOf(bits << 16 | 0x8001u)).bits == bits + 1);
  }
}

void OutOfRangeGoesToInfinity() {
  CHECK(ToFloat16(65519.0f).bits == 0x7bff);
  CHECK(ToFloat16(65520.0f).bits == 0x7c00);
  CHECK(ToFloat16(-1e30f).bits == 0xfc00);
  CHECK(ToBFloat16(3.4e38f).bits == 0x7f80);
}

// Whatever instructions the CPU has, for numbers of every size, exact ones and those beside and between them, and for rows
// that fill vectors or not.
template <class T>
void RowsAreRoundedAsTheirElements(ValueType type) {
  std::vector<float> numbers;
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    for (const uint32_t low : {0x0u, 0x1u, 0x0fffu, 0x1000u, 0x2001u, 0x7fffu, 0x8000u, 0xffffu}) {
      numbers.push_back(FloatOf(bits << 16 | low));
    }
    const float half = ToFloat(Float16{static_cast<uint16_t>(bits)});
    numbers.push_back(FloatOf(BitsOf(half) + static_cast<uint32_t>(Mix64(bits) % 8192)));
  }
  const RowConversion conversion = BestRowConversion(type);
  for (const int64_t dim : {1, 7, 16, 31, 64, 100, 200}) {
    std::vector<T> row(static_cast<size_t>(dim) + 1);
    for (size_t i = 0; i + static_cast<size_t>(dim) <= numbers.size(); i += static_cast<size_t>(dim)) {
      const uint64_t stream = Mix64(i);
      const uint64_t first_word = i % 5;
      row.back().bits = 0x1234;
      conversion.store_stochastically(&numbers[i], dim, stream, first_word, row.data());
      for (size_t j = 0; j < static_cast<size_t>(dim); ++j) {
        const uint32_t random = static_cast<uint32_t>(RandomWord(stream, first_word + j / 2) >> (j % 2 * 32));
        CHECK(row[j].bits == StoreStochastically<T>(numbers[i + j], random).bits);
      }
      CHECK(row.back().bits == 0x1234);
    }
  }
}

bool IsSame(float a, float b) { return BitsOf(a) == BitsOf(b) || (std::isnan(a) && std::isnan(b)); }

// The same of conversions that are exact or round to nearest: every pattern at every place of a row.
template <class T>
void RowsAreConvertedAsTheirElements(ValueType type) {
  const RowConversion conversion = BestRowConversion(type);
  for (const size_t dim : {1, 7, 8, 15, 16, 17, 31, 64, 100}) {
    std::vector<T> row(dim), stored(dim + 1);
    std::vector<float> loaded(dim + 1), sum(dim + 1);
    for (uint32_t first = 0; first <= 0xffff; ++first) {
      for (size_t j = 0; j < dim; ++j) row[j].bits = static_cast<uint16_t>(first + j * 257);
      for (size_t j = 0; j <= dim; ++j) sum[j] = 0.1f * static_cast<float>(j);
      loaded.back() = 5.0f;
      stored.back().bits = 0x1234;
      conversion.load(row.data(), static_cast<int64_t>(dim), loaded.data());
      conversion.accumulate(row.data(), static_cast<int64_t>(dim), sum.data());
      conversion.store(sum.data(), static_cast<int64_t>(dim), stored.data());
      for (size_t j = 0; j < dim; ++j) {
        CHECK(IsSame(loaded[j], Element<T>::Load(row[j])));
        CHECK(IsSame(sum[j], 0.1f * static_cast<float>(j) + Element<T>::Load(row[j])));
        CHECK(IsSame(Element<T>::Load(stored[j]), Element<T>::Load(Element<T>::Store(sum[j]))));
      }
      CHECK(loaded.back() == 5.0f && stored.back().bits == 0x1234);
      CHECK(sum.back() == 0.1f * static_cast<float>(dim));
    }
  }
}

}  // namespace
}  // namespace kvtable

int main() {
  kvtable::EveryPatternSurvivesARoundTrip();
  kvtable::MiddlesGoToEven();
  kvtable::OutOfRangeGoesToInfinity();
  kvtable::RowsAreRoundedAsTheirElements<kvtable::Float16>(kvtable::ValueType::kFloat16);
  kvtable::RowsAreRoundedAsTheirElements<kvtable::BFloat16>(kvtable::ValueType::kBFloat16);
  kvtable::RowsAreConvertedAsTheirElements<kvtable::Float16>(kvtable::ValueType::kFloat16);
  kvtable::RowsAreConvertedAsTheirElements<kvtable::BFloat16>(kvtable::ValueType::kBFloat16);
  return 0;
}
