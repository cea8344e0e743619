// Every 16-bit pattern survives a round trip, and rounding goes to the nearest, ties to even.
#include "values/float16.h"

#include <cmath>
#include <cstdint>

#include "check.h"

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

}  // namespace
}  // namespace kvtable

int main() {
  kvtable::EveryPatternSurvivesARoundTrip();
  kvtable::MiddlesGoToEven();
  kvtable::OutOfRangeGoesToInfinity();
  return 0;
}
