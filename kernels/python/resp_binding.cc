// The Redis protocol for kvtools.server.resp: commands in, rows out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "arguments.h"
#include "bindings.h"
#include "serving/resp.h"

using nb::literals::operator""_a;

namespace kvtable {
namespace {

constexpr int64_t kWorthReleasing = 1 << 16;  // bytes

using Rows = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Keys = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>;
using Command = RespReader::Command;

nb::bytes BytesOf(std::string_view text) { return nb::bytes(text.data(), text.size()); }

Keys KeysOf(const std::vector<int64_t>& keys) {
  int64_t* const copy = new int64_t[keys.size()];
  std::copy(keys.begin(), keys.end(), copy);
  nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<int64_t*>(p); });
  return Keys(copy, {keys.size()}, owner);
}

// What comes next, as (what it is, ...): None where more bytes are needed.
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
      return nb::make_tuple("lookup", BytesOf(reader->table()), KeysOf(reader->keys()), low, high);
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

nb::bytes Reply(const std::vector<Command>& commands, const Rows& rows, const Flags& found, bool resp3) {
  int64_t keys = 0;
  for (const Command& command : commands) keys += command.keys;
  if (static_cast<int64_t>(rows.shape(0)) != keys || static_cast<int64_t>(found.shape(0)) != keys) {
    ThrowValue("rows and found have other lengths than there are keys.");
  }
  const uint8_t* const flags = reinterpret_cast<const uint8_t*>(found.data());
  const int64_t row_bytes = static_cast<int64_t>(rows.shape(1));
  const int64_t bytes = RowsBytes(commands, flags, row_bytes, resp3);
  nb::bytes reply = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, bytes));
  if (!reply.is_valid()) throw nb::python_error();
  char* const out = PyBytes_AS_STRING(reply.ptr());
  if (bytes > kWorthReleasing) {
    nb::gil_scoped_release release;
    WriteRows(commands, rows.data(), flags, row_bytes, resp3, out);
  } else {
    WriteRows(commands, rows.data(), flags, row_bytes, resp3, out);
  }
  return reply;
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
           "('lookup', table, keys int64 [n], lowest, highest): commands that ask one table for rows;\n"
           "('command', words): another command; ('refused', why): one that is wrong;\n"
           "('broken', why): bytes that are no command; nothing can be read after them.")
      .def("commands", &CommandsOf,
           "Return the commands of the last lookup: (keys, whether one row is asked for, lowest, highest).")
      .def(
          "reply",
          [](const RespReader& self, const Rows& rows, const Flags& found, bool resp3) {
            return Reply(self.commands(), rows, found, resp3);
          },
          "rows"_a, "found"_a, "resp3"_a,
          "Write the replies of the last lookup: `rows` uint8 [n, bytes of a row], null where `found` [n] is "
          "false.")
      .def_prop_ro("partial", &RespReader::partial, "Whether part of a command is there.");
  m.def(
      "resp_rows",
      [](const Rows& rows, const Flags& found, bool single, bool resp3) {
        return Reply({{static_cast<int64_t>(rows.shape(0)), single, 0, 0}}, rows, found, resp3);
      },
      "rows"_a, "found"_a, "single"_a, "resp3"_a,
      "Write the reply to one command: `rows` uint8 [n, bytes of a row], null where `found` [n] is false.");
}

}  // namespace kvtable
