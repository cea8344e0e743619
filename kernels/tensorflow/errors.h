// Statuses from parts of a message.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kvtools::errors {

template <typename... Parts>
absl::Status InvalidArgument(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}
template <typename... Parts>
absl::Status NotFound(const Parts&... parts) {
  return absl::NotFoundError(absl::StrCat(parts...));
}
template <typename... Parts>
absl::Status FailedPrecondition(const Parts&... parts) {
  return absl::FailedPreconditionError(absl::StrCat(parts...));
}
template <typename... Parts>
absl::Status ResourceExhausted(const Parts&... parts) {
  return absl::ResourceExhaustedError(absl::StrCat(parts...));
}
template <typename... Parts>
absl::Status DataLoss(const Parts&... parts) {
  return absl::DataLossError(absl::StrCat(parts...));
}
template <typename... Parts>
absl::Status Unimplemented(const Parts&... parts) {
  return absl::UnimplementedError(absl::StrCat(parts...));
}
template <typename... Parts>
absl::Status Internal(const Parts&... parts) {
  return absl::InternalError(absl::StrCat(parts...));
}

}  // namespace kvtools::errors
