// The Redis protocol for kvtools.server.resp: commands in, rows out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arguments.h"
#include "connection_writer.h"
#include "epoch.h"
#include "kvtable/snapshot.h"
#include "serving/lookup_counts.h"
#include "serving/resp.h"
#include "snapshot_bindings.h"
#include "spin.h"

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

// Bytes that grow without being cleared first.
class Replies {
 public:
  char* Grow(size_t bytes) {
    if (size_ + bytes > capacity_) {
      const size_t capacity = std::max(size_ + bytes, 2 * capacity_);
      std::unique_ptr<char[]> larger(new char[capacity]);
      if (size_ > 0) std::memcpy(larger.get(), data_.get(), size_);
      data_ = std::move(larger);
      capacity_ = capacity;
    }
    char* const at = data_.get() + size_;
    size_ += bytes;
    return at;
  }
  // Those that are kept from one segment to the next, of each of thousands of connections, are few.
  void Clear() {
    size_ = 0;
    if (capacity_ <= kMostKept) return;
    data_.reset();
    capacity_ = 0;
  }
  std::string_view text() const { return {data_.get(), size_}; }
  size_t size() const { return size_; }

 private:
  static constexpr size_t kMostKept = 4096;
  std::unique_ptr<char[]> data_;
  size_t size_ = 0, capacity_ = 0;
};

// Appends the replies to the lookup that was read. False where Python must give them.
bool AppendReplies(const RespTables::Table& table, const RespReader& reader, bool resp3, Replies* replies) {
  const auto began = std::chrono::steady_clock::now();
  const std::vector<int64_t>& keys = reader.keys();
  const int64_t n = static_cast<int64_t>(keys.size()), row_bytes = table.table->value_bytes();
  if (n > table.most_keys) return false;
  for (const Command& command : reader.commands()) {
    if (command.low < table.low || command.high > table.high) return false;
  }
  uint8_t few[kReleaseFrom];
  std::unique_ptr<uint8_t[]> many;
  if (n > kReleaseFrom) many.reset(new uint8_t[static_cast<size_t>(n)]);
  uint8_t* const found = many != nullptr ? many.get() : few;
  const std::unique_ptr<uint8_t[]> rows(new uint8_t[static_cast<size_t>(n * row_bytes)]);
  // While others run Python, what is served may become another: the table stays until this is done.
  const nb::object kept = n < kReleaseFrom ? nb::object() : nb::find(table.table);
  int64_t missing = 0;
  size_t bytes = 0;
  try {
    WithoutLock(n, [&] {
      missing = table.table->LookupRaw(keys.data(), n, rows.get(), found);
      bytes = static_cast<size_t>(RowsBytes(reader.commands(), found, row_bytes, resp3));
      WriteRows(reader.commands(), rows.get(), found, row_bytes, resp3, replies->Grow(bytes));
    });
  } catch (const Error&) {
    return false;  // it will be met again, and then told
  }
  if (table.recent != nullptr && table.recent->Due()) table.recent->Note(keys.data(), n);
  table.tally->Add(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count(), 0,
                   static_cast<int64_t>(bytes), n, missing);
  return true;
}

// What the bytes of a connection come to first. While it is armed, lookups of tables that the connection may look up are
// answered here, and nothing else may write to the connection; all else goes to Python.
class RespWay {
 public:
  RespWay(RespReader::Limits limits) : reader_(limits) {}

  RespReader& reader() { return reader_; }

  // `received(data)` is Python's way, `go(item)` the same for what was read and is not answered: see `run`.
  void Begin(nb::object received, nb::object go, const nb::object& transport, int descriptor,
             const nb::object& spin) {
    received_ = std::move(received);
    go_ = std::move(go);
    writer_.Begin(transport, descriptor);
    spin_ = spin;
    spinning_ = spin.is_none() ? nullptr : nb::cast<Spin*>(spin);
  }

  // Lets go of all that it was given: it is part of it, so that nobody else would.
  void End() {
    armed_ = false;
    writer_.End();
    spinning_ = nullptr;
    tables_ = nullptr;
    received_ = go_ = known_ = spin_ = nb::object();
  }

  void Arm(const nb::object& known, bool resp3) {
    armed_ = true;
    writer_.Renew();
    if (!known_.is(known)) {
      known_ = known;
      tables_ = nb::cast<RespTables*>(known);
    }
    resp3_ = resp3;
  }

  void Disarm() { armed_ = false; }

  void Received(const nb::bytes& data) {
    if (spinning_ != nullptr) spinning_->Arrive(Spin::Clock::now());
    if (!armed_) {
      const nb::object received = received_;
      if (received.is_valid()) received(data);
      return;
    }
    reader_.Feed({data.c_str(), data.size()});
    while (true) {
      replies_.Clear();
      bool full;
      const RespReader::Kind kind = Answer(tables_, resp3_, &replies_, &full);
      if (replies_.size() > 0) {
        writer_.Write(replies_.text());  // which may disarm this, or end it
        if (spinning_ != nullptr) spinning_->Touch(Spin::Clock::now());
      }
      if (full && armed_) continue;
      if (!full && kind == RespReader::Kind::kNothing && !reader_.partial()) break;
      armed_ = false;
      const nb::object go = go_;
      if (go.is_valid()) go(full ? nb::make_tuple("more") : ItemOf(&reader_, kind));
      return;
    }
    replies_.Clear();
  }

  nb::tuple Run(const RespTables* tables, bool resp3) {
    Replies replies;
    bool full;
    const RespReader::Kind kind = Answer(tables, resp3, &replies, &full);
    const std::string_view text = replies.text();
    return nb::make_tuple(nb::bytes(text.data(), text.size()),
                          full ? nb::make_tuple("more") : ItemOf(&reader_, kind));
  }

 private:
  // Answers what it can. `*full`: there are enough replies for now; otherwise it returns what was read and is not answered.
  RespReader::Kind Answer(const RespTables* tables, bool resp3, Replies* replies, bool* full) {
    *full = false;
    while (replies->size() < kMostAtOnce) {
      const RespReader::Kind kind = reader_.Next();
      if (kind == RespReader::Kind::kLookup && tables != nullptr) {
        const RespTables::Table* const table = tables->Find(reader_.table());
        if (table != nullptr && AppendReplies(*table, reader_, resp3, replies)) continue;
      }
      return kind;
    }
    *full = true;
    return RespReader::Kind::kNothing;
  }

  RespReader reader_;
  nb::object received_, go_, known_, spin_;
  RespTables* tables_ = nullptr;  // known_
  Spin* spinning_ = nullptr;      // spin_, where there is one
  ConnectionWriter writer_;
  Replies replies_;
  bool armed_ = false, resp3_ = false;
};

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
  char* const out = PyBytes_AsString(reply.ptr());
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

  nb::class_<RespWay>(
      m, "RespReader",
      "Takes commands of the Redis protocol from the bytes of one connection, and answers lookups.")
      .def(
          "__init__",
          [](RespWay* self, int64_t max_keys, int64_t max_bytes, int64_t max_word_bytes) {
            new (self) RespWay({max_keys, max_bytes, max_word_bytes, max_keys});
          },
          "max_keys"_a, "max_bytes"_a, "max_word_bytes"_a)
      .def("begin", &RespWay::Begin, "received"_a, "go"_a, "transport"_a, "descriptor"_a,
           "spin"_a.none() = nb::none(),
           "Begin, disarmed: all that comes goes to `received(data)`. `descriptor` is that of the socket, or "
           "-1: only\n"
           "the transport may write to it.")
      .def("end", &RespWay::End, "Let go of what was given; a connection that is over has to.")
      .def("arm", &RespWay::Arm, "tables"_a, "resp3"_a,
           "Answer lookups of `tables`, until `disarm` or something else comes: that goes to `go(item)`, as "
           "`run` returns\n"
           "it. Nobody else may write to the transport meanwhile.")
      .def("disarm", &RespWay::Disarm, "Hand on all that comes.")
      .def("received", &RespWay::Received, "data"_a)
      .def(
          "feed",
          [](RespWay* self, const nb::bytes& data) { self->reader().Feed({data.c_str(), data.size()}); },
          "data"_a, "Add bytes that came.")
      .def(
          "next", [](RespWay* self) { return ItemOf(&self->reader(), self->reader().Next()); },
          "Return what comes next, or None if more bytes are needed:\n"
          "('lookup', table, number of keys, lowest, highest): commands that ask one table for rows;\n"
          "('command', words): another command; ('refused', why): one that is wrong;\n"
          "('broken', why): bytes that are no command; nothing can be read after them.")
      .def(
          "run", &RespWay::Run, "tables"_a.none(), "resp3"_a,
          "Answer lookups of `tables` as long as nothing else comes: the replies, and what `next` returns of "
          "what is\n"
          "not answered; or ('more',) after 64 KiB of replies.")
      .def(
          "keys", [](RespWay* self) { return KeysOf(self->reader()); },
          "Return the keys of the last lookup, int64 [n] (of uint64: their bits).")
      .def(
          "commands", [](RespWay* self) { return CommandsOf(self->reader()); },
          "Return the commands of the last lookup: (keys, whether one row is asked for, lowest, highest).")
      .def(
          "answer",
          [](RespWay* self, const SnapshotTable& table, bool resp3) {
            const RespReader& reader = self->reader();
            return Answer(table, reader.commands(), reader.keys().data(),
                          static_cast<int64_t>(reader.keys().size()), resp3);
          },
          "table"_a, "resp3"_a,
          "Return the replies to the last lookup, whose keys are in the table's range: rows in the table's "
          "own type,\n"
          "null where there is none; and how many keys have none.")
      .def_prop_ro(
          "partial", [](RespWay* self) { return self->reader().partial(); },
          "Whether part of a command is there.");
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
