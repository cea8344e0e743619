// What kvtools._kvtable is made of, and the codecs of the server.
#pragma once

#include <nanobind/nanobind.h>

namespace kvtable {

void BindTable(nanobind::module_& m);          // Table, Exporter
void BindInitialValues(nanobind::module_& m);  // initial_values, hash_key
void BindOptimizers(nanobind::module_& m);     // optimizers, apply_to_arrays

void BindServing(nanobind::module_& m);  // read_json_lookup, json_rows, json_flags

// The part of docstrings that says what an initializer is.
extern const char* const kInitializerDoc;

}  // namespace kvtable
