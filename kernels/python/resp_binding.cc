// The Redis protocol for kvtools.server.resp: commands in, rows out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "arguments.h"
#include "kvtable/snapshot.h"
#include "serving/resp.h"
#include "snapshot_bindings.h"

using nb::literals::operator""_a;

namespace kvtable {
namespace {

constexpr int64_t kReleaseFrom = 256;  // keys: below that, giving the GIL away costs more than it brings

using Keys = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>;
using GivenKeys = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Command = RespReader::Command;

nb::bytes BytesOf(std::string_view text) { return nb::bytes(text.data(), text.size()); }

template <class Work>
void WithoutLock(int64_t keys, const Work& work) {
  if (keys < kReleaseFrom) return work();
  const nb::gil_scoped_release release;
  work();
}

Keys KeysOf(const RespReader& reader) {
  const std::vector<int64_t>& keys = reader.keys();
  auto copy = std::make_unique<int64_t[]>(keys.size());
  std::copy(keys.begin(), keys.end(), copy.get());
  nb::capsule owner(copy.get(), [](void* p) noexcept { delete[] static_cast<int64_t*>(p); });
  return Keys(copy.release(), {keys.size()}, owner);
}

nb::object Next(RespReader* reader) {
  switch (reader->Next()) {
    case RespReader::Kind::kNothing:
      return nb::none();
    case RespReader::Kind::kLookup: {
      int64_t low = 0;
      uint64_t high = 0;
      for (const Command& command : reader->commands()) {
        low = std::min(low, command.low);
        high = std::max(high, command.high);
      }
      return nb::make_tuple("lookup", BytesOf(reader->table()), reader->keys().size(), low, high);
    }
    case RespReader::Kind::kCommand: {
      nb::list words;
      for (const std::string_view word : reader->words()) words.append(BytesOf(word));
      return nb::make_tuple("command", words);
    }
    case RespReader::Kind::kRefused:
      return nb::make_tuple("refused", nb::str(reader->fault().c_str()));
    case RespReader::Kind::kBroken:
      return nb::make_tuple("broken", nb::str(reader->fault().c_str()));
  }
  return nb::none();
}

// The replies to commands whose keys are `keys` (n), and how many keys have no row.
nb::tuple Answer(const SnapshotTable& table, const std::vector<Command>& commands, const int64_t* keys,
                 int64_t n, bool resp3) {
  const int64_t row_bytes = table.value_bytes();
  const std::unique_ptr<uint8_t[]> rows(new uint8_t[static_cast<size_t>(n * row_bytes)]);
  const std::unique_ptr<uint8_t[]> found(new uint8_t[static_cast<size_t>(n)]);
  int64_t bytes = 0, absent = 0;
  WithoutLock(n, [&] {
    absent = table.LookupRaw(keys, n, rows.get(), found.get());
    bytes = RowsBytes(commands, found.get(), row_bytes, resp3);
  });
  nb::bytes reply = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, bytes));
  if (!reply.is_valid()) throw nb::python_error();
  char* const out = PyBytes_AS_STRING(reply.ptr());
  WithoutLock(n, [&] { WriteRows(commands, rows.get(), found.get(), row_bytes, resp3, out); });
  return nb::make_tuple(reply, absent);
}

nb::list CommandsOf(const RespReader& reader) {
  nb::list commands;
  for (const Command& command : reader.commands()) {
    commands.append(nb::make_tuple(command.keys, command.single, command.low, command.high));
  }
  return commands;
}

}  // namespace

void BindResp(nb::module_& m) {
  nb::class_<RespReader>(m, "RespReader",
                         "Takes commands of the Redis protocol from the bytes of one connection.")
      .def(
          "__init__",
          [](RespReader* self, int64_t max_keys, int64_t max_bytes, int64_t max_word_bytes) {
            new (self) RespReader({max_keys, max_bytes, max_word_bytes, max_keys});
          },
          "max_keys"_a, "max_bytes"_a, "max_word_bytes"_a)
      .def(
          "feed", [](RespReader* self, const nb::bytes& data) { self->Feed({data.c_str(), data.size()}); },
          "data"_a, "Add bytes that came.")
      .def("next", &Next,
           "Return what comes next, or None if more bytes are needed:\n"
           "('lookup', table, number of keys, lowest, highest): commands that ask one table for rows;\n"
           "('command', words): another command; ('refused', why): one that is wrong;\n"
           "('broken', why): bytes that are no command; nothing can be read after them.")
      .def("keys", &KeysOf, "Return the keys of the last lookup, int64 [n] (of uint64: their bits).")
      .def("commands", &CommandsOf,
           "Return the commands of the last lookup: (keys, whether one row is asked for, lowest, highest).")
      .def(
          "answer",
          [](const RespReader& self, const SnapshotTable& table, bool resp3) {
            return Answer(table, self.commands(), self.keys().data(),
                          static_cast<int64_t>(self.keys().size()), resp3);
          },
          "table"_a, "resp3"_a,
          "Return the replies to the last lookup, whose keys are in the table's range: rows in the table's "
          "own type,\n"
          "null where there is none; and how many keys have none.")
      .def_prop_ro("partial", &RespReader::partial, "Whether part of a command is there.");
  m.def(
      "resp_answer",
      [](const SnapshotTable& table, const GivenKeys& keys, bool single, bool resp3) {
        const int64_t n = static_cast<int64_t>(keys.shape(0));
        return Answer(table, {{n, single, 0, 0}}, keys.data(), n, resp3);
      },
      "table"_a, "keys"_a, "single"_a, "resp3"_a,
      "Return the reply to one command that asks for `keys` int64 [n], as `RespReader.answer` does.");
}

}  // namespace kvtable
