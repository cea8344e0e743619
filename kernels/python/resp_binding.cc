// The Redis protocol for kvtools.server.resp: commands in, rows out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arguments.h"
#include "epoch.h"
#include "kvtable/snapshot.h"
#include "serving/lookup_counts.h"
#include "serving/resp.h"
#include "snapshot_bindings.h"

using nb::literals::operator""_a;

namespace kvtable {
namespace {

constexpr int64_t kReleaseFrom = 256;  // keys: below that, giving the GIL away costs more than it brings
constexpr size_t kMostAtOnce = 65536;  // bytes of replies; then it is looked whether they are read

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

// What was read, as `next` returns it.
nb::object ItemOf(const RespReader* reader, RespReader::Kind kind) {
  switch (kind) {
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

nb::object Next(RespReader* reader) { return ItemOf(reader, reader->Next()); }

// The tables that a connection may look up just now, by the names that it gives them.
class RespTables {
 public:
  struct Table {
    const SnapshotTable* table;  // the epoch holds it
    int64_t low;
    uint64_t high;
    int64_t most_keys;
    Tally* tally;
    RecentKeys* recent;  // or null
  };

  explicit RespTables(Epoch* epoch) : epoch_(epoch) {}

  bool valid() const { return epoch_->valid(); }

  void Add(const nb::bytes& name, const nb::object& table, int64_t low, uint64_t high, int64_t most_keys,
           Tally* tally, RecentKeys* recent) {
    epoch_->Hold(table);
    tables_.insert_or_assign(
        std::string(name.c_str(), name.size()),
        Table{nb::cast<const SnapshotTable*>(table), low, high, most_keys, tally, recent});
  }

  // Null where a lookup of this name is to be answered by Python.
  const Table* Find(const std::string& name) const {
    if (!valid()) return nullptr;
    const auto found = tables_.find(name);
    return found == tables_.end() ? nullptr : &found->second;
  }

 private:
  Epoch* epoch_;
  std::unordered_map<std::string, Table> tables_;
};

// Appends the replies to the lookup that was read. False where Python must give them.
bool AppendReplies(const RespTables::Table& table, const RespReader& reader, bool resp3,
                   std::string* replies) {
  const auto began = std::chrono::steady_clock::now();
  const std::vector<int64_t>& keys = reader.keys();
  const int64_t n = static_cast<int64_t>(keys.size()), row_bytes = table.table->value_bytes();
  if (n > table.most_keys || n >= kReleaseFrom) return false;
  for (const Command& command : reader.commands()) {
    if (command.low < table.low || command.high > table.high) return false;
  }
  const std::unique_ptr<uint8_t[]> rows(new uint8_t[static_cast<size_t>(n * row_bytes)]);
  uint8_t found[kReleaseFrom];
  int64_t missing;
  try {
    missing = table.table->LookupRaw(keys.data(), n, rows.get(), found);
  } catch (const Error&) {
    return false;  // it will be met again, and then told
  }
  const size_t before = replies->size(),
               bytes = static_cast<size_t>(RowsBytes(reader.commands(), found, row_bytes, resp3));
  replies->resize(before + bytes);
  WriteRows(reader.commands(), rows.get(), found, row_bytes, resp3, replies->data() + before);
  if (table.recent != nullptr && table.recent->Due()) table.recent->Note(keys.data(), n);
  table.tally->Add(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count(), 0,
                   static_cast<int64_t>(bytes), n, missing);
  return true;
}

nb::tuple Run(RespReader* reader, const RespTables* tables, bool resp3) {
  std::string replies;
  const auto result = [&](nb::object item) {
    return nb::make_tuple(nb::bytes(replies.data(), replies.size()), std::move(item));
  };
  while (replies.size() < kMostAtOnce) {
    const RespReader::Kind kind = reader->Next();
    if (kind == RespReader::Kind::kLookup && tables != nullptr) {
      const RespTables::Table* const table = tables->Find(reader->table());
      if (table != nullptr && AppendReplies(*table, *reader, resp3, &replies)) continue;
    }
    return result(ItemOf(reader, kind));
  }
  return result(nb::make_tuple("more"));
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
  nb::class_<RespTables>(
      m, "RespTables", "The tables that a connection may look up just now, by the names that it gives them.")
      .def(nb::init<Epoch*>(), "epoch"_a, nb::keep_alive<1, 2>())
      .def_prop_ro("valid", &RespTables::valid, "Whether their epoch goes on.")
      .def("add", &RespTables::Add, "name"_a, "table"_a, "low"_a, "high"_a, "most_keys"_a, "tally"_a,
           "recent"_a.none(), nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(),
           "Add a table, whose keys are `low` to `high`; lookups of more than `most_keys` are left to the "
           "caller.");

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
      .def(
          "run", &Run, "tables"_a.none(), "resp3"_a,
          "Answer lookups of `tables` as long as nothing else comes: the replies, and what `next` returns of "
          "what is\n"
          "not answered; or ('more',) after 64 KiB of replies.")
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
