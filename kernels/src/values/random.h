// Counter-based random numbers for initial values: plain functions of (seed, key, column) made of additions,
// multiplications, divisions and square roots, which IEEE 754 rounds the same everywhere. So every device
// computes the same bits, as long as its compiler fuses no multiplication with an addition.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/hash.h"
#include "base/host_device.h"

namespace kvtable {

// The stream of a key: bits j of it are Mix64(stream + (j + 1) * golden ratio), splitmix64 started at the
// stream. A word gives two columns of 32 bits (low half first) or one column of 64.
KVTABLE_HOST_DEVICE inline constexpr uint64_t RandomStream(uint64_t seed, uint64_t key) {
  return Mix64(seed ^ Mix64(key));
}
KVTABLE_HOST_DEVICE inline constexpr uint64_t RandomWord(uint64_t stream, uint64_t j) {
  return Mix64(stream + (j + 1) * 0x9e3779b97f4a7c15ULL);
}

// [0, 1)
KVTABLE_HOST_DEVICE inline float UniformOf32(uint32_t bits) {
  return static_cast<float>(bits >> 8) * 0x1p-24f;
}
KVTABLE_HOST_DEVICE inline double UniformOf64(uint64_t bits) {
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

// (0, 1), symmetric about one half: for the inverse normal distribution, which has no value at the ends.
// Given as the distance from one half, (-1/2, 1/2), which keeps the precision of both tails alike.
KVTABLE_HOST_DEVICE inline float CenteredOf32(uint32_t bits) {
  return (static_cast<float>(static_cast<int32_t>(bits) >> 8) + 0.5f) * 0x1p-24f;
}
KVTABLE_HOST_DEVICE inline double CenteredOf64(uint64_t bits) {
  return (static_cast<double>(static_cast<int64_t>(bits) >> 11) + 0.5) * 0x1p-53;
}

// The natural logarithm of a normal positive number, to about 2 units in the last place. The C library's own
// differs between libraries and on a GPU. x is m 2^k with m between sqrt(1/2) and sqrt(2), and log(m) is
// 2 artanh(s) with s = (m - 1) / (m + 1), |s| < 0.172: eleven terms of the series are enough.
KVTABLE_HOST_DEVICE inline double NaturalLog(double x) {
  constexpr uint64_t kSqrtHalf = 0x3fe6a09e667f3bcdULL;
  uint64_t bits;
  memcpy(&bits, &x, sizeof(bits));
  const int64_t exponent = static_cast<int64_t>(bits - kSqrtHalf) >> 52;
  bits -= static_cast<uint64_t>(exponent) << 52;
  double m;
  memcpy(&m, &bits, sizeof(m));
  const double s = (m - 1.0) / (m + 1.0);
  const double t = s * s;
  double series = 1.0 / 21;
  for (int term = 19; term >= 1; term -= 2) series = series * t + 1.0 / term;
  return static_cast<double>(exponent) * 0.693147180559945309417 + 2.0 * s * series;
}

// The normal distribution's quantile at 1/2 + q, for q in (-1/2, 1/2). Wichura's algorithm AS 241 (Applied
// Statistics 37, 1988): PPND7 for float, about 7 digits; PPND16 for double, about 16.
KVTABLE_HOST_DEVICE inline float NormalQuantile(float q) {
  const float distance = std::fabs(q);
  if (distance <= 0.425f) {
    const float r = 0.180625f - q * q;
    return q *
           (((5.9109374720e+01f * r + 1.5929113202e+02f) * r + 5.0434271938e+01f) * r + 3.3871327179e+00f) /
           (((6.7187563600e+01f * r + 7.8757757664e+01f) * r + 1.7895169469e+01f) * r + 1.0f);
  }
  float r = std::sqrt(static_cast<float>(-NaturalLog(static_cast<double>(0.5f - distance))));
  float z;
  if (r <= 5.0f) {
    r -= 1.6f;
    z = (((1.7023821103e-01f * r + 1.3067284816e+00f) * r + 2.7568153900e+00f) * r + 1.4234372777e+00f) /
        ((1.2021132975e-01f * r + 7.3700164250e-01f) * r + 1.0f);
  } else {
    r -= 5.0f;
    z = (((1.7337203997e-02f * r + 4.2868294337e-01f) * r + 3.0812263860e+00f) * r + 6.6579051150e+00f) /
        ((1.2258202635e-02f * r + 2.4197894225e-01f) * r + 1.0f);
  }
  return q < 0 ? -z : z;
}

KVTABLE_HOST_DEVICE inline double NormalQuantile(double q) {
  const double distance = std::fabs(q);
  if (distance <= 0.425) {
    const double r = 0.180625 - q * q;
    return q *
           (((((((2.5090809287301226727e+3 * r + 3.3430575583588128105e+4) * r + 6.7265770927008700853e+4) *
                    r +
                4.5921953931549871457e+4) *
                   r +
               1.3731693765509461125e+4) *
                  r +
              1.9715909503065514427e+3) *
                 r +
             1.3314166789178437745e+2) *
                r +
            3.3871328727963666080e+0) /
           (((((((5.2264952788528545610e+3 * r + 2.8729085735721942674e+4) * r + 3.9307895800092710610e+4) *
                    r +
                2.1213794301586595867e+4) *
                   r +
               5.3941960214247511077e+3) *
                  r +
              6.8718700749205790830e+2) *
                 r +
             4.2313330701600911252e+1) *
                r +
            1.0);
  }
  double r = std::sqrt(-NaturalLog(0.5 - distance));
  double z;
  if (r <= 5.0) {
    r -= 1.6;
    z = (((((((7.74545014278341407640e-4 * r + 2.27238449892691845833e-2) * r + 2.41780725177450611770e-1) *
                 r +
             1.27045825245236838258e+0) *
                r +
            3.64784832476320460504e+0) *
               r +
           5.76949722146069140550e+0) *
              r +
          4.63033784615654529590e+0) *
             r +
         1.42343711074968357734e+0) /
        (((((((1.05075007164441684324e-9 * r + 5.47593808499534494600e-4) * r + 1.51986665636164571966e-2) *
                 r +
             1.48103976427480074590e-1) *
                r +
            6.89767334985100004550e-1) *
               r +
           1.67638483018380384940e+0) *
              r +
          2.05319162663775882187e+0) *
             r +
         1.0);
  } else {
    r -= 5.0;
    z = (((((((2.01033439929228813265e-7 * r + 2.71155556874348757815e-5) * r + 1.24266094738807843860e-3) *
                 r +
             2.65321895265761230930e-2) *
                r +
            2.96560571828504891230e-1) *
               r +
           1.78482653991729133580e+0) *
              r +
          5.46378491116411436990e+0) *
             r +
         6.65790464350110377720e+0) /
        (((((((2.04426310338993978564e-15 * r + 1.42151175831644588870e-7) * r + 1.84631831751005468180e-5) *
                 r +
             7.86869131145613259100e-4) *
                r +
            1.48753612908506148525e-2) *
               r +
           1.36929880922735805310e-1) *
              r +
          5.99832206555887937690e-1) *
             r +
         1.0);
  }
  return q < 0 ? -z : z;
}

// What the standard normal distribution holds within two standard deviations: a centered uniform scaled by
// this is one of the distribution cut there.
inline constexpr double kWithinTwoDeviations = 0.95449973610364158;

// One element of an initial value, of the random bits of its column. C is float or double, Bits the unsigned
// integer of its size.

// [a, b): `width` is b - a, `below` the largest number under b, which rounding must not reach.
KVTABLE_HOST_DEVICE inline float UniformDraw(uint32_t bits, float a, float width, float below) {
  const float x = a + width * UniformOf32(bits);
  return x < below ? x : below;
}
KVTABLE_HOST_DEVICE inline double UniformDraw(uint64_t bits, double a, double width, double below) {
  const double x = a + width * UniformOf64(bits);
  return x < below ? x : below;
}

KVTABLE_HOST_DEVICE inline float NormalDraw(uint32_t bits, float mean, float deviation) {
  return mean + deviation * NormalQuantile(CenteredOf32(bits));
}
KVTABLE_HOST_DEVICE inline double NormalDraw(uint64_t bits, double mean, double deviation) {
  return mean + deviation * NormalQuantile(CenteredOf64(bits));
}

KVTABLE_HOST_DEVICE inline float TruncatedNormalDraw(uint32_t bits, float mean, float deviation) {
  return mean + deviation * NormalQuantile(static_cast<float>(kWithinTwoDeviations) * CenteredOf32(bits));
}
KVTABLE_HOST_DEVICE inline double TruncatedNormalDraw(uint64_t bits, double mean, double deviation) {
  return mean + deviation * NormalQuantile(kWithinTwoDeviations * CenteredOf64(bits));
}

}  // namespace kvtable
