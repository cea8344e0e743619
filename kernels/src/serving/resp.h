// The Redis protocol, from the server's side: commands taken from the bytes of a connection, and rows written as
// replies. Of commands that ask for rows, as many as stand together go into one lookup.
//
// A row is named by a key in decimal: GET table:17, MGET table:17 table:-3, HGET table 17, HMGET table 17 -3. What
// stands before the last colon is the table; without a colon it is the one that the connection selected.
//
// Protocol: https://redis.io/docs/latest/develop/reference/protocol-spec/.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvtable {

// Takes commands from the bytes of one connection, by one thread at a time.
class RespReader {
 public:
  struct Limits {
    int64_t keys = 65536;         // of a command
    int64_t bytes = 16 << 20;     // of a command
    int64_t word_bytes = 4096;    // of a word in it
    int64_t lookup_keys = 65536;  // of a lookup: what several commands ask for together
  };
  enum class Kind {
    kNothing,  // more bytes are needed
    kLookup,   // table(), keys(), commands(): one or more commands that ask one table for rows
    kCommand,  // words(): any other command
    kRefused,  // fault(): a command that is answered by an error; the next one can be read
    kBroken,   // fault(): no command, and what follows cannot be read: the connection is to be closed
  };
  // A command of a lookup, which has the next `keys` keys of it.
  struct Command {
    int64_t keys;
    bool single;    // answered by a row, not by an array of rows
    int64_t low;    // the lowest key, if any is negative; else 0
    uint64_t high;  // the highest key, if any is not negative; else 0
  };

  explicit RespReader(Limits limits) : limits_(limits) {}

  // Adds what came. What Next() returned before may not be used any more.
  void Feed(std::string_view bytes);

  Kind Next();

  const std::string& table() const { return table_; }         // empty: the one that is selected
  const std::vector<int64_t>& keys() const { return keys_; }  // uint64 keys of 2^63 and more as their bits
  const std::vector<Command>& commands() const { return commands_; }
  const std::vector<std::string_view>& words() const { return words_; }
  const std::string& fault() const { return fault_; }
  // Whether part of a command is there.
  bool partial() const { return at_ < buffer_.size(); }

 private:
  enum class Step { kMore, kWhole, kEmpty, kBroken };

  Step ReadCommand();
  Step ReadInline();
  Step ReadCount();
  Step ReadWords();
  Step Break(std::string fault);
  // A line that is a length of a few digits, as nearly all are. False: it is read in the usual way.
  bool ReadShortLength(size_t from, size_t* end, int64_t* length) const;
  bool ReadLine(size_t from, size_t longest, size_t* end) const;
  // Adds the command that was read to the lookup. False: it asks another table, or is no lookup, or a wrong one, which
  // `*fault` then says.
  bool Append(bool first, std::string* fault);
  void Drop();

  Limits limits_;
  std::string buffer_;
  size_t at_ = 0;                                 // where the command begins that is being read
  size_t next_ = 0;                               // where to go on reading it
  int64_t left_ = -1;                             // words of it to come; -1: their number is not known yet
  bool whole_ = false;                            // words_ are a command that was read and not returned
  std::vector<std::pair<size_t, size_t>> spans_;  // place and length of its words
  std::string table_;
  std::vector<int64_t> keys_;
  std::vector<Command> commands_;
  std::vector<std::string_view> words_;
  std::string fault_;
};

// Reads a decimal number: its bits, whether it is negative, and false where it is none of int64 or uint64. Zeros may lead:
// keys that redis-benchmark draws have them.
bool ReadDecimal(std::string_view text, int64_t* bits, bool* negative);

// How many bytes WriteRows writes.
int64_t RowsBytes(const std::vector<RespReader::Command>& commands, const uint8_t* found, int64_t row_bytes,
                  bool resp3);

// Writes the replies to `commands`: `rows` (keys, row_bytes) as bulk strings, and null where `found` (keys) is 0.
void WriteRows(const std::vector<RespReader::Command>& commands, const uint8_t* rows, const uint8_t* found,
               int64_t row_bytes, bool resp3, char* out);

}  // namespace kvtable
