// What a rank sends to another one when it wants rows of it, in 64-bit words:
//
//   bytes    length of an error text; 0 where there is none
//   tables   number of tables
//   lookup   hash of what is looked up, which is the same on all ranks (exchange_agreement.h)
//   bytes    length of the text of that; 0 where all ranks know it
//   count    (tables) number of keys of each
//   text     padded to whole words
//   key      those of table 0, those of table 1, ...
//
// A rank that finds something wrong with its own ids cannot just fail: the others would wait for it. It sends
// the error to everybody instead of keys: after the first two words the text, padded to whole words.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvtable {

// Words of a message of this many keys in all, with a text of so many bytes.
int64_t KeysMessageWords(int64_t tables, int64_t keys, int64_t text_bytes);

// Writes what precedes the keys, and returns where they go.
int64_t* WriteKeysHeader(const std::vector<int64_t>& counts, uint64_t lookup, const std::string& text,
                         int64_t* message);

// The message of an error.
std::vector<int64_t> ErrorMessage(const std::string& error, int64_t tables);

// A message as it came. Points into it.
struct AskedKeys {
  std::string error;  // if not empty, there is nothing else
  int64_t tables = 0;
  uint64_t lookup = 0;
  std::string text;
  const int64_t* counts = nullptr;  // (tables)
  const int64_t* keys = nullptr;    // (sum of counts)
};

// Throws Error(kInvalidArgument) where it is no message.
AskedKeys ReadKeysMessage(const int64_t* message, int64_t words);

}  // namespace kvtable
