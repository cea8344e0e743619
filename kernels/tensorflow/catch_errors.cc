#include "catch_errors.h"

#include <exception>
#include <new>
#include <stdexcept>

#include "errors.h"
#include "kvtable/types.h"

namespace kvtools {

absl::Status StatusOfException(const std::string& subject) {
  try {
    throw;
  } catch (const kvtable::Error& e) {
    switch (e.code()) {
      case kvtable::ErrorCode::kInvalidArgument:
        return errors::InvalidArgument(subject, ": ", e.what());
      case kvtable::ErrorCode::kResourceExhausted:
        return errors::ResourceExhausted(subject, ": ", e.what());
      case kvtable::ErrorCode::kFailedPrecondition:
        return errors::FailedPrecondition(subject, ": ", e.what());
    }
    return errors::Internal(subject, ": ", e.what());
  } catch (const std::bad_alloc&) {
    return errors::ResourceExhausted(subject, ": out of memory.");
  } catch (const std::length_error&) {  // more elements than any memory has room for
    return errors::ResourceExhausted(subject, ": out of memory.");
  } catch (const std::invalid_argument& e) {
    return errors::InvalidArgument(subject, ": ", e.what());
  } catch (const std::exception& e) {
    return errors::Internal(subject, ": ", e.what());
  } catch (...) {
    return errors::Internal(subject, ": unknown error.");
  }
}

absl::Status StatusOfException(std::string_view doing, const std::string& name) {
  const std::string what = name.empty() ? " rows" : " key-value variable '" + name + "'";
  return StatusOfException(std::string(doing) + what);
}

}  // namespace kvtools
