// Exceptions as statuses. TensorFlow throws none and catches none: one that is thrown past it ends the
// process.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace kvtools {

// The exception that is being handled, as a status whose message begins with `subject`. For catch clauses.
absl::Status StatusOfException(const std::string& subject);

// The same about a key-value variable: "<doing> key-value variable '<name>': ...", or, without a name, of several:
// "<doing> rows: ...".
absl::Status StatusOfException(std::string_view doing, const std::string& name);

// The status that `body` returns, or that of what it throws.
template <class Body>
absl::Status CatchErrors(std::string_view doing, const std::string& name, const Body& body) {
  try {
    return body();
  } catch (...) {
    return StatusOfException(doing, name);
  }
}

}  // namespace kvtools
