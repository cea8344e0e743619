// What the server's short ways are made of: lookups prepared for an epoch, and what is noted of each.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "epoch.h"
#include "serving/lookup_counts.h"
#include "serving/prepared_lookup.h"
#include "snapshot_bindings.h"

using nb::literals::operator""_a;

namespace kvtable {
namespace {

using GivenKeys = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// With what it points to; but for the table, which the epoch holds.
struct Prepared {
  Epoch* epoch;
  PreparedLookup lookup;
  std::string responses;

  Prepared(Epoch* of, PreparedLookup::Plan plan) : epoch(of), lookup(std::move(plan)) {}
};

nb::object Answer(Prepared* prepared, const nb::bytes& data, int64_t at, const nb::bytes& defaults) {
  if (!prepared->epoch->valid()) return nb::none();
  prepared->responses.clear();
  int64_t answers;
  const size_t end =
      prepared->lookup.Answer({data.c_str(), data.size()}, static_cast<size_t>(at),
                              {defaults.c_str(), defaults.size()}, &prepared->responses, &answers);
  if (answers == 0) return nb::none();
  return nb::make_tuple(nb::bytes(prepared->responses.data(), prepared->responses.size()), end, answers);
}

void Prepare(Prepared* self, Epoch* epoch, const nb::object& table, const nb::bytes& head, int64_t key_begin,
             int64_t key_end, int64_t body_bytes, bool binary_keys, bool binary_rows, int missing,
             int64_t max_keys, int64_t max_numbers, int64_t version, RequestIds* ids, Tally* tally,
             RecentKeys* recent) {
  epoch->Hold(table);
  PreparedLookup::Plan plan;
  plan.table = nb::cast<const SnapshotTable*>(table);
  plan.head.assign(head.c_str(), head.size());
  plan.key_begin = static_cast<size_t>(key_begin);
  plan.key_end = static_cast<size_t>(key_end);
  plan.body_bytes = static_cast<size_t>(body_bytes);
  plan.form.binary_keys = binary_keys;
  plan.form.binary_rows = binary_rows;
  plan.form.missing = static_cast<MissingKeys>(missing);
  plan.form.max_keys = max_keys;
  plan.form.max_numbers = max_numbers;
  plan.form.one_row = key_begin != key_end;
  plan.form.recent = recent;
  plan.version = version;
  plan.ids = ids;
  plan.tally = tally;
  new (self) Prepared(epoch, std::move(plan));
}

nb::object KeysOf(const RecentKeys& recent) {
  auto owned = std::make_unique<std::vector<int64_t>>(recent.keys());
  std::vector<int64_t>* const keys = owned.get();
  nb::capsule owner(owned.release(), [](void* p) noexcept { delete static_cast<std::vector<int64_t>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>(keys->data(), {keys->size()}, owner));
}

}  // namespace

void BindPrepared(nb::module_& m) {
  nb::class_<Epoch>(m, "Epoch", "The time in which what is served, and to whom, stays as it is.")
      .def(nb::init<>())
      .def_prop_ro("valid", &Epoch::valid, "Whether it goes on.")
      .def("hold", &Epoch::Hold, "object"_a, "Keep `object` to the end; after it this does nothing.")
      .def("end", &Epoch::End, "End it: what was prepared from it answers nothing any more.");

  nb::class_<Tally>(m, "Tally", "Counters and a histogram of answers of one kind.")
      .def(nb::init<std::vector<double>>(), "bounds"_a)
      .def(
          "counts",
          [](const Tally& self) {
            const Tally::Counts& counts = self.counts();
            return nb::make_tuple(counts.answers, counts.buckets, counts.seconds, counts.bytes_in,
                                  counts.bytes_out, counts.keys, counts.missing);
          },
          "Return what was counted: answers, the answers in each bucket of seconds (the last one has what "
          "is\n"
          "above all bounds), seconds, bytes in, bytes out, keys, missing keys.");

  nb::class_<RequestIds>(m, "RequestIds", "Makes ids: a prefix, and a number.")
      .def(nb::init<std::string>(), "prefix"_a)
      .def("begin", &RequestIds::Begin, "prefix"_a, "Begin anew, with a prefix of another process.")
      .def(
          "next",
          [](RequestIds* self) {
            std::string id;
            self->AppendNext(&id);
            return id;
          },
          "Return an id that was not returned before.");

  nb::class_<RecentKeys>(m, "RecentKeys", "The last keys that were noted, up to `size` of them.")
      .def(nb::init<int64_t>(), "size"_a)
      .def("due", &RecentKeys::Due, "Tell, of each request, whether it is one whose keys are to be noted.")
      .def(
          "add",
          [](RecentKeys* self, const GivenKeys& keys) {
            self->Note(keys.data(), static_cast<int64_t>(keys.shape(0)));
          },
          "keys"_a, "Note up to 64 of `keys` int64 [n].")
      .def("noted", &KeysOf, "Return the keys that are kept, int64 [n], in no order.");

  nb::class_<Prepared>(m, "PreparedLookup",
                       "Lookups by HTTP whose head is known; see kernels/src/serving/prepared_lookup.h.")
      .def("__init__", &Prepare, "epoch"_a, "table"_a, "head"_a, "key_begin"_a, "key_end"_a, "body_bytes"_a,
           "binary_keys"_a, "binary_rows"_a, "missing"_a, "max_keys"_a, "max_numbers"_a, "version"_a, "ids"_a,
           "tally"_a, "recent"_a.none(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 14>(),
           nb::keep_alive<1, 15>(), nb::keep_alive<1, 16>())
      .def_prop_ro("valid", [](const Prepared& self) { return self.epoch->valid(); })
      .def("answer", &Answer, "data"_a, "at"_a, "defaults"_a,
           "Answer requests of this head that follow each other in `data` from `at` on, with the header "
           "lines\n"
           "`defaults`. Returns (responses, where it stopped, how many they are), or None where there is "
           "none.");
}

}  // namespace kvtable
