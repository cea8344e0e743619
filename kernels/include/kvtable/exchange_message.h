// What a rank sends to another one when it wants rows of it, in 64-bit words:
//
//   bytes    length of an error text; 0 where there is none
//   tables   number of tables
//   count    (tables) number of keys of each; with an error text: not there
//   key      those of table 0, those of table 1, ...; with an error text: the text, padded to whole words
//
// A rank that finds something wrong with its own ids cannot just fail: the others would wait for it. It sends
// the error to everybody instead of keys.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvtable {

// Words of a message of this many keys in all.
int64_t KeysMessageWords(int64_t tables, int64_t keys);

// Writes what precedes the keys, and returns where they go.
int64_t* WriteKeysHeader(const std::vector<int64_t>& counts, int64_t* message);

// The message of an error.
std::vector<int64_t> ErrorMessage(const std::string& error, int64_t tables);

// A message as it came. Points into it.
struct AskedKeys {
  std::string error;                // if not empty, there is nothing else
  const int64_t* counts = nullptr;  // (tables)
  const int64_t* keys = nullptr;    // (sum of counts)
};

// Throws Error(kInvalidArgument) where it is no message for this many tables.
AskedKeys ReadKeysMessage(const int64_t* message, int64_t words, int64_t tables);

}  // namespace kvtable
