#include "values/initial_value.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "base/hash.h"
#include "values/elements.h"
#include "values/random.h"

namespace kvtable {
namespace {

// Calls store(column, draw) for each column, `draw` made by `of` from the column's bits.
template <class Compute, class Of, class Store>
inline void ForEachDraw(uint64_t stream, int64_t dim, const Of& of, const Store& store) {
  if constexpr (sizeof(Compute) == 8) {
    for (int64_t j = 0; j < dim; ++j) store(j, of(RandomWord(stream, static_cast<uint64_t>(j))));
  } else {
    for (int64_t j = 0; j < dim / 2; ++j) {
      const uint64_t word = RandomWord(stream, static_cast<uint64_t>(j));
      store(2 * j, of(static_cast<uint32_t>(word)));
      store(2 * j + 1, of(static_cast<uint32_t>(word >> 32)));
    }
    if (dim % 2 != 0) {
      store(dim - 1, of(static_cast<uint32_t>(RandomWord(stream, static_cast<uint64_t>(dim / 2)))));
    }
  }
}

template <class T>
void FillRandom(const Initializer& init, uint64_t key, int64_t dim, T* value) {
  using C = typename Element<T>::Compute;
  using Bits = std::conditional_t<sizeof(C) == 8, uint64_t, uint32_t>;
  const C a = static_cast<C>(init.a);
  const C b = static_cast<C>(init.b);
  const uint64_t stream = RandomStream(init.seed, key);
  switch (init.kind) {
    case Initializer::Kind::kUniform: {
      const C width = b - a;
      const C below = std::max(a, std::nextafter(b, a));
      ForEachDraw<C>(
          stream, dim, [&](Bits bits) { return UniformDraw(bits, a, width, below); },
          [&](int64_t j, C x) { value[j] = Element<T>::Store(x); });
      return;
    }
    case Initializer::Kind::kNormal:
      ForEachDraw<C>(
          stream, dim, [&](Bits bits) { return NormalDraw(bits, a, b); },
          [&](int64_t j, C x) { value[j] = Element<T>::Store(x); });
      return;
    default:
      ForEachDraw<C>(
          stream, dim, [&](Bits bits) { return TruncatedNormalDraw(bits, a, b); },
          [&](int64_t j, C x) { value[j] = Element<T>::Store(x); });
      return;
  }
}

[[noreturn]] void ThrowInvalid(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, "Bad initializer: " + what);
}

}  // namespace

uint64_t HashKey(uint64_t key) { return Mix64(key); }

InitialValue::InitialValue(const Initializer& initializer, ValueType value_type, int64_t dim,
                           std::optional<uint64_t> padding_key)
    : initializer_(initializer),
      value_type_(value_type),
      dim_(dim),
      value_bytes_(dim * SizeOf(value_type)),
      padding_key_(padding_key) {
  const double a = initializer.a;
  const double b = initializer.b;
  const bool is_drawn =
      initializer.kind != Initializer::Kind::kConstant && initializer.kind != Initializer::Kind::kRows;
  if (is_drawn && !IsFloating(value_type)) {
    ThrowInvalid(
        "random numbers are drawn for floating values, and this table has integer or bool values. Give it a "
        "constant, or rows to choose from.");
  }
  switch (initializer.kind) {
    case Initializer::Kind::kConstant:
      constant_.resize(static_cast<size_t>(value_bytes_));
      VisitAnyValueType(value_type, [&](auto t) {
        using T = decltype(t);
        if (!IsElement<T>(a)) {
          ThrowInvalid("the constant " + std::to_string(a) +
                       " is no value of the table's integer or bool type.");
        }
        const T constant = Element<T>::FromDouble(a);
        for (int64_t j = 0; j < dim; ++j) std::memcpy(constant_.data() + j * sizeof(T), &constant, sizeof(T));
      });
      return;
    case Initializer::Kind::kUniform:
      if (!std::isfinite(a) || !std::isfinite(b) || a > b) {
        ThrowInvalid("uniform from " + std::to_string(a) + " to " + std::to_string(b) +
                     "; expected two finite numbers in ascending order.");
      }
      return;
    case Initializer::Kind::kNormal:
    case Initializer::Kind::kTruncatedNormal:
      if (!std::isfinite(a) || !std::isfinite(b) || b < 0) {
        ThrowInvalid("normal with mean " + std::to_string(a) + " and standard deviation " +
                     std::to_string(b) + "; expected finite numbers, the second not negative.");
      }
      return;
    case Initializer::Kind::kRows: {
      const int64_t held = initializer.rows == nullptr ? 0 : static_cast<int64_t>(initializer.rows->size());
      if (initializer.num_rows <= 0 || held / value_bytes_ != initializer.num_rows ||
          held % value_bytes_ != 0) {
        ThrowInvalid(std::to_string(initializer.num_rows) + " rows in " + std::to_string(held) +
                     " bytes; expected at least one row, of " + std::to_string(value_bytes_) +
                     " bytes each.");
      }
      return;
    }
  }
  ThrowInvalid("kind " + std::to_string(static_cast<int>(initializer.kind)) + " does not exist.");
}

void InitialValue::Fill(uint64_t key, void* value) const {
  if (padding_key_ == key) {
    std::memset(value, 0, static_cast<size_t>(value_bytes_));
  } else if (initializer_.kind == Initializer::Kind::kConstant) {
    std::memcpy(value, constant_.data(), static_cast<size_t>(value_bytes_));
  } else if (initializer_.kind == Initializer::Kind::kRows) {
    const uint64_t row = HashKey(key) % static_cast<uint64_t>(initializer_.num_rows);
    std::memcpy(value, initializer_.rows->data() + row * static_cast<uint64_t>(value_bytes_),
                static_cast<size_t>(value_bytes_));
  } else {
    VisitValueType(value_type_,
                   [&](auto t) { FillRandom(initializer_, key, dim_, static_cast<decltype(t)*>(value)); });
  }
}

}  // namespace kvtable
