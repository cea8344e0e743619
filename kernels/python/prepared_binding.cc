// What the server's short ways are made of: lookups prepared for an epoch, and what is noted of each.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "arguments.h"
#include "connection_writer.h"
#include "epoch.h"
#include "serving/lookup_counts.h"
#include "serving/prepared_lookup.h"
#include "snapshot_bindings.h"
#include "spin.h"

using nb::literals::operator""_a;

namespace kvtable {
namespace {

using GivenKeys = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// With what it points to; but for the tables, which the epoch holds.
struct Prepared {
  Epoch* epoch;
  PreparedLookup lookup;
  std::vector<nb::object> held;
  std::string responses;

  Prepared(Epoch* of, PreparedLookup::Plan plan, std::vector<nb::object> with)
      : epoch(of), lookup(std::move(plan)), held(std::move(with)) {}
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

using Holes = std::vector<std::tuple<size_t, size_t, int>>;

HeadTemplate TemplateOf(const nb::bytes& head, const Holes& holes) {
  std::vector<HeadTemplate::Hole> made;
  for (const auto& [begin, end, kind] : holes) {
    if (kind < 0 || kind > static_cast<int>(HeadTemplate::Kind::kText))
      throw Error(ErrorCode::kInvalidArgument, "a hole of a head: there is no such kind");
    made.push_back({begin, end, static_cast<HeadTemplate::Kind>(kind)});
  }
  return HeadTemplate(std::string(head.c_str(), head.size()), std::move(made));
}

void Prepare(Prepared* self, Epoch* epoch, int what, const nb::bytes& head, const Holes& holes,
             const nb::list& tables, bool binary_keys, bool binary_rows, int missing, int64_t max_keys,
             int64_t max_numbers, int64_t version, RequestIds* ids, const nb::object& several,
             const nb::bytes& about) {
  std::vector<nb::object> held;
  std::vector<PreparedLookup::Table> named;
  for (nb::handle entry : tables) {
    const auto name = nb::cast<nb::bytes>(entry[0]);
    const nb::object table = entry[1], tally = entry[2], recent = entry[3];
    epoch->Hold(table);
    held.push_back(tally);
    held.push_back(recent);
    named.push_back({std::string(name.c_str(), name.size()), nb::cast<const SnapshotTable*>(table),
                     nb::cast<Tally*>(tally), recent.is_none() ? nullptr : nb::cast<RecentKeys*>(recent)});
  }
  if (named.empty()) throw Error(ErrorCode::kInvalidArgument, "a prepared lookup: expected a table");
  held.push_back(several);
  PreparedLookup::Plan plan{static_cast<PreparedLookup::What>(what),
                            TemplateOf(head, holes),
                            std::move(named),
                            {},
                            version,
                            ids,
                            several.is_none() ? nullptr : nb::cast<Tally*>(several),
                            std::string(about.c_str(), about.size())};
  plan.form.binary_keys = binary_keys;
  plan.form.binary_rows = binary_rows;
  plan.form.missing = static_cast<MissingKeys>(missing);
  plan.form.max_keys = max_keys;
  plan.form.max_numbers = max_numbers;
  plan.form.recent = plan.tables[0].recent;
  for (const auto& hole : holes) {
    plan.form.one_row |= static_cast<HeadTemplate::Kind>(std::get<2>(hole)) == HeadTemplate::Kind::kKey;
  }
  new (self) Prepared(epoch, std::move(plan), std::move(held));
}

// What a connection's segments come to first. While it is armed, whole requests of its last heads are answered here, and
// nothing else may write to the connection; all else goes to Python.
class ShortWay {
 public:
  // `received(data)` is Python's way. `descriptor` is that of the socket, -1 where only the transport may write.
  void Begin(nb::object received, const nb::object& transport, nb::object state, int descriptor,
             const nb::object& spin) {
    received_ = std::move(received);
    writer_.Begin(transport, descriptor);
    state_ = std::move(state);
    spin_ = spin;
    spinning_ = spin.is_none() ? nullptr : nb::cast<Spin*>(spin);
  }

  // Lets go of all that it was given: it is part of it, so that nobody else would.
  void End() {
    armed_ = false;
    for (Known& known : known_) known = {};
    writer_.End();
    spinning_ = nullptr;
    received_ = state_ = defaults_ = spin_ = nb::object();
  }

  void Arm(nb::object prepared) {
    armed_ = true;
    writer_.Renew();
    for (const Known& known : known_) {
      if (known.object.is(prepared)) return;
    }
    Known& oldest = known_[next_++ % kKnown];
    oldest.lookup = nb::cast<Prepared*>(prepared);
    oldest.object = std::move(prepared);
  }

  void Disarm() { armed_ = false; }

  double since() const { return since_; }

  void Received(const nb::bytes& data) {
    if (spinning_ != nullptr) spinning_->Arrive(Spin::Clock::now());
    const std::string_view bytes{data.c_str(), data.size()};
    size_t end = 0;
    if (armed_) {
      ReadDefaults();
      responses_.clear();
      while (end < bytes.size()) {
        const size_t before = end;
        for (const Known& known : known_) {
          int64_t answers;
          if (known.lookup != nullptr && known.lookup->epoch->valid()) {
            end = known.lookup->lookup.Answer(bytes, end, lines_, &responses_, &answers);
          }
        }
        if (end == before) break;
      }
      if (end > 0) {
        const auto now = std::chrono::steady_clock::now();
        since_ = std::chrono::duration<double>(now.time_since_epoch()).count();
        writer_.Write(responses_);  // which may disarm this, or end it
        if (spinning_ != nullptr) spinning_->Touch(Spin::Clock::now());
      }
    }
    if (end == bytes.size()) return;
    const nb::object received = received_;
    if (received.is_valid()) received(end == 0 ? data : nb::bytes(bytes.data() + end, bytes.size() - end));
  }

 private:
  // As bytes, the header lines that every response has; uvicorn makes new ones once a second.
  void ReadDefaults() {
    nb::object defaults = state_.attr("default_headers");
    if (defaults.is(defaults_)) return;
    lines_.clear();
    for (nb::handle header : defaults) {
      const auto name = nb::cast<nb::bytes>(header[0]), value = nb::cast<nb::bytes>(header[1]);
      lines_.append(name.c_str(), name.size())
          .append(": ")
          .append(value.c_str(), value.size())
          .append("\r\n");
    }
    defaults_ = std::move(defaults);
  }

  // A client may ask in several forms in turns.
  static constexpr size_t kKnown = 4;
  struct Known {
    nb::object object;
    Prepared* lookup = nullptr;
  };

  nb::object received_, state_, defaults_, spin_;
  ConnectionWriter writer_;
  Spin* spinning_ = nullptr;  // spin_, where there is one
  Known known_[kKnown];
  size_t next_ = 0;
  bool armed_ = false;
  std::string responses_;
  std::string lines_;
  double since_ = 0;
};

Spin::Clock::time_point TimeOf(double now) {
  if (now < 0) return Spin::Clock::now();
  return Spin::Clock::time_point(std::chrono::duration_cast<Spin::Clock::duration>(Spin::Seconds(now)));
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
      .def(nb::init<std::vector<double>, std::vector<double>>(), "bounds"_a,
           "other_bounds"_a = std::vector<double>())
      .def(
          "counts",
          [](const Tally& self) {
            const Tally::Counts& counts = self.counts();
            return nb::make_tuple(counts.answers, counts.buckets, counts.seconds, counts.bytes_in,
                                  counts.bytes_out, counts.keys, counts.missing);
          },
          "Return what was counted: answers, the answers in each bucket of seconds (the last one has what "
          "is\n"
          "above all bounds), seconds, bytes in, bytes out, keys, missing keys.")
      .def(
          "more",
          [](const Tally& self) { return nb::make_tuple(self.counts().other_buckets, self.counts().last); },
          "Return the same of the other bounds, and when the last answer was given, in ms since 1970: where "
          "there are such.");

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
      .def("__init__", &Prepare, "epoch"_a, "what"_a, "head"_a, "holes"_a, "tables"_a, "binary_keys"_a,
           "binary_rows"_a, "missing"_a, "max_keys"_a, "max_numbers"_a, "version"_a, "ids"_a,
           "several"_a.none() = nb::none(), "about"_a = nb::bytes("", 0), nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 13>(),
           "`what` is that of server/prepared.py; `holes` are (begin, end, kind) of values in `head`; "
           "`tables` "
           "are\n"
           "(name, table, tally, recent keys or None).")
      .def_prop_ro("valid", [](const Prepared& self) { return self.epoch->valid(); })
      .def("answer", &Answer, "data"_a, "at"_a, "defaults"_a,
           "Answer requests of this head that follow each other in `data` from `at` on, with the header "
           "lines\n"
           "`defaults`. Returns (responses, where it stopped, how many they are), or None where there is "
           "none.");

  nb::class_<Spin>(m, "Spin", "An event loop that looks for the next request for a while before it sleeps.")
      .def(nb::init<double, nb::object, bool>(), "seconds"_a, "call_soon"_a, "bounded"_a = false)
      .def(
          "arrive", [](Spin* self, double now) { self->Arrive(TimeOf(now)); }, "now"_a = -1.0,
          "Something came; at `now` by the clock of the event loop, or at this moment.")
      .def(
          "touch", [](Spin* self, double now) { self->Touch(TimeOf(now)); }, "now"_a = -1.0,
          "Something was answered.")
      .def(
          "turn", [](Spin* self, double now) { self->Turn(TimeOf(now)); }, "now"_a = -1.0,
          "What the loop calls.")
      .def_prop_ro("found", &Spin::found, "Seconds for which it looked for requests that came.")
      .def_prop_ro("vain", &Spin::vain, "Seconds for which it looked for some that did not.");

  nb::class_<ShortWay>(m, "ShortWay", "What the segments of a connection come to first.")
      .def(nb::init<>())
      .def("begin", &ShortWay::Begin, "received"_a, "transport"_a, "state"_a, "descriptor"_a,
           "spin"_a.none() = nb::none(),
           "Begin, disarmed: all that comes goes to `received(data)`. `state` has `default_headers`;\n"
           "`descriptor` is that of the socket, or -1: only the transport may write to it.")
      .def("end", &ShortWay::End, "Let go of what was given; a connection that is over has to.")
      .def("arm", &ShortWay::Arm, "prepared"_a,
           "Answer whole requests of the head of `prepared`, until `disarm`, and hand on the rest of a "
           "segment.\n"
           "Nobody else may write to the transport meanwhile.")
      .def("disarm", &ShortWay::Disarm, "Hand on all that comes.")
      .def("received", &ShortWay::Received, "data"_a)
      .def_prop_ro("since", &ShortWay::since, "When something was answered, by the clock of the event loop.");
}

}  // namespace kvtable
