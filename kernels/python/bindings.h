// What kvtools._kvtable is made of.
#pragma once

#include <nanobind/nanobind.h>

namespace kvtable {

void BindTable(nanobind::module_& m);          // Table, Exporter
void BindInitialValues(nanobind::module_& m);  // initial_values, hash_key
void BindOptimizers(nanobind::module_& m);     // optimizers, apply_to_arrays

// The part of docstrings that says what an initializer is.
extern const char* const kInitializerDoc;

}  // namespace kvtable
