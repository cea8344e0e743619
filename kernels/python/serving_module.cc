// kvtools._serving: the codecs of the lookup server.
#include <nanobind/nanobind.h>

#include "bindings.h"

NB_MODULE(_serving, m) {
  kvtable::BindServing(m);
  kvtable::BindResp(m);
}
