// kvtools._snapshot: snapshots, read and written without the GIL.
#include <nanobind/nanobind.h>

#include <cerrno>
#include <system_error>

#include "arguments.h"
#include "snapshot_bindings.h"

namespace kvtable {
namespace {

void TranslateSystemError(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const std::system_error& e) {
    errno = e.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
  }
}

}  // namespace
}  // namespace kvtable

NB_MODULE(_snapshot, m) {
  // A server that ends with lookups in threads leaves objects behind, which is no fault to tell its operator of.
  nanobind::set_leak_warnings(false);
  m.doc() = "Snapshots: the tables of a model in one immutable, mapped file.";
  nanobind::register_exception_translator(kvtable::TranslateError);
  nanobind::register_exception_translator(kvtable::TranslateSystemError);
  kvtable::BindSnapshots(m);
  kvtable::BindSnapshotWriter(m);
  kvtable::BindServing(m);
  kvtable::BindPrepared(m);
  kvtable::BindResp(m);
}
