// An Initializer made ready for one value type and dim.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kvtable/initializer.h"
#include "kvtable/types.h"

namespace kvtable {

// Immutable: any number of threads may fill values with it at once.
class InitialValue {
 public:
  // Throws Error(kInvalidArgument) on parameters that make no distribution.
  // That of the padding key (widened), where there is one, is zeros.
  InitialValue(const Initializer& initializer, ValueType value_type, int64_t dim,
               std::optional<uint64_t> padding_key = std::nullopt);

  // Writes the initial value of `key`: dim elements.
  void Fill(uint64_t key, void* value) const;

  const Initializer& initializer() const { return initializer_; }

 private:
  Initializer initializer_;
  ValueType value_type_;
  int64_t dim_;
  int64_t value_bytes_;
  std::optional<uint64_t> padding_key_;
  std::vector<char> constant_;  // the value, for Kind::kConstant
};

}  // namespace kvtable
