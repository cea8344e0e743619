// kvtools._kvtable: the table engine for Python.
#include <nanobind/nanobind.h>

#include "arguments.h"
#include "bindings.h"

NB_MODULE(_kvtable, m) {
  m.doc() = "The table engine: a concurrent map from integer keys to embedding rows with optimizer slots.";

  nanobind::register_exception_translator(kvtable::TranslateError);
  kvtable::BindTable(m);
  kvtable::BindInitialValues(m);
  kvtable::BindOptimizers(m);
}
