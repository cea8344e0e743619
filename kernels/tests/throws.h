// Whether something throws an Error of this code, with this in its message.
#pragma once

#include <string>

#include "kvtable/types.h"

namespace kvtable {

template <class Body>
bool Throws(ErrorCode code, const char* part, const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.code() == code && std::string(error.what()).find(part) != std::string::npos;
  }
  return false;
}

template <class Body>
bool Throws(ErrorCode code, const Body& body) {
  return Throws(code, "", body);
}

}  // namespace kvtable
