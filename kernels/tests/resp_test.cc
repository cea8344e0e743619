// The reader of the Redis protocol: the same commands however their bytes are cut, and no end on any bytes.
#include "serving/resp.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "check.h"

namespace kvtable {
namespace {

using Kind = RespReader::Kind;

std::string Words(const std::vector<std::string>& words) {
  std::string text = "*" + std::to_string(words.size()) + "\r\n";
  for (const std::string& word : words) text += "$" + std::to_string(word.size()) + "\r\n" + word + "\r\n";
  return text;
}

// Everything that a reader gives, as text; lookups key by key, so that it does not matter which stood together.
std::string Transcript(const std::string& bytes, const std::vector<size_t>& cuts) {
  RespReader reader({10, 4096, 100, 10});
  std::string said;
  size_t at = 0;
  for (size_t cut : cuts) {
    cut = std::min(cut, bytes.size() - at);
    reader.Feed(std::string(bytes, at, cut));
    at += cut;
    for (Kind kind; (kind = reader.Next()) != Kind::kNothing;) {
      if (kind == Kind::kBroken) return said + "broken: " + reader.fault();
      if (kind == Kind::kRefused) said += "refused: " + reader.fault() + "\n";
      if (kind == Kind::kCommand) {
        for (const std::string_view word : reader.words()) said += std::string(word) + " ";
        said += "\n";
      }
      if (kind == Kind::kLookup) {
        size_t key = 0;
        for (const RespReader::Command& command : reader.commands()) {
          said += reader.table() + (command.single ? " one" : " many");
          for (int64_t i = 0; i < command.keys; ++i) said += " " + std::to_string(reader.keys()[key++]);
          said += "\n";
        }
        CHECK(key == reader.keys().size());
      }
    }
  }
  return said;
}

void AnyCutGivesTheSameCommands() {
  const std::string bytes = Words({"GET", "a:b:17"}) + Words({"mget", "t:1", "t:-9223372036854775808"}) +
                            "\r\n" + "PING x\r\n" + Words({"HMGET", "t", "18446744073709551615"}) +
                            Words({"GET", "t:x"}) + Words({"MGET", "a:1", "b:2"}) +
                            Words({"SET", "", "a\r\nb"}) + Words({"HGET", "t", "3"}) + "*0\r\n*-1\r\n" +
                            Words({"MGET", "1", "2", "3", "4", "5", "6", "7", "8", "9", "0", "1"}) +
                            Words({"GET"}) + "*1\r\n$3\r\nQUIT\r\n";
  const std::string whole = Transcript(bytes, {bytes.size()});
  CHECK(whole.find("a:b one 17\nt many 1 -9223372036854775808\nPING x \nt many -1\nrefused: got key 'x'") ==
        0);
  CHECK(whole.find("MGET a:1 b:2 \n") != std::string::npos);
  CHECK(whole.find("refused: got 11 keys, expected at most 10") != std::string::npos);
  CHECK(whole.find("broken: Protocol error: a bulk string is longer than it says") != std::string::npos);
  for (size_t first = 0; first <= bytes.size(); ++first) {
    CHECK(Transcript(bytes, {first, bytes.size()}) == whole);
  }
  CHECK(Transcript(bytes, std::vector<size_t>(bytes.size(), 1)) == whole);
}

void ChangedBytesComeToAnEnd() {
  std::mt19937_64 random(7);
  const std::string bytes = Words({"MGET", "t:1", "t:2"}) + Words({"HGET", "t", "3"}) + "GET t:4\r\n";
  for (int round = 0; round < 20000; ++round) {
    std::string changed = bytes;
    for (int i = 0; i < 3; ++i) changed[random() % changed.size()] = "*$\r\n0129-:x"[random() % 11];
    Transcript(changed, {random() % changed.size(), changed.size()});
  }
}

void NumbersOfSixtyFourBits() {
  int64_t bits;
  bool negative;
  CHECK(ReadDecimal("18446744073709551615", &bits, &negative) && bits == -1 && !negative);
  CHECK(ReadDecimal("-9223372036854775808", &bits, &negative) && bits == INT64_MIN && negative);
  CHECK(ReadDecimal("-0", &bits, &negative) && bits == 0 && !negative);
  CHECK(ReadDecimal("00000000000000000017", &bits, &negative) && bits == 17);
  for (const char* text : {"", "-", "+1", "1 ", " 1", "1.0", "18446744073709551616", "-9223372036854775809",
                           "000000000000000000017", "0x1"}) {
    CHECK(!ReadDecimal(text, &bits, &negative));
  }
}

void RepliesTakeTheBytesTheySay() {
  const std::vector<RespReader::Command> commands = {{2, false, 0, 0}, {1, true, 0, 0}, {0, false, 0, 0}};
  const uint8_t rows[] = "aaabbbccc", found[] = {1, 0, 1};
  for (const bool resp3 : {false, true}) {
    std::string out(static_cast<size_t>(RowsBytes(commands, found, 3, resp3)), '?');
    WriteRows(commands, rows, found, 3, resp3, out.data());
    CHECK(out == std::string("*2\r\n$3\r\naaa\r\n") + (resp3 ? "_\r\n" : "$-1\r\n") + "$3\r\nccc\r\n*0\r\n");
  }
}

}  // namespace
}  // namespace kvtable

int main() {
  kvtable::AnyCutGivesTheSameCommands();
  kvtable::ChangedBytesComeToAnEnd();
  kvtable::NumbersOfSixtyFourBits();
  kvtable::RepliesTakeTheBytesTheySay();
}
