#include "kvtable/exchange_message.h"

#include <cstring>

#include "kvtable/types.h"

namespace kvtable {
namespace {

constexpr int64_t kHeaderWords = 2;
constexpr int64_t kWord = sizeof(int64_t);

[[noreturn]] void ThrowMalformed(int64_t words, int64_t tables, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, "a message of " + std::to_string(words) +
                                               " words does not ask for rows of " + std::to_string(tables) +
                                               " tables: " + what +
                                               ". All ranks must look up the same tables in the same order.");
}

}  // namespace

int64_t KeysMessageWords(int64_t tables, int64_t keys) { return kHeaderWords + tables + keys; }

int64_t* WriteKeysHeader(const std::vector<int64_t>& counts, int64_t* message) {
  message[0] = 0;
  message[1] = static_cast<int64_t>(counts.size());
  for (size_t t = 0; t < counts.size(); ++t) message[kHeaderWords + static_cast<int64_t>(t)] = counts[t];
  return message + KeysMessageWords(message[1], 0);
}

std::vector<int64_t> ErrorMessage(const std::string& error, int64_t tables) {
  const std::string text = error.empty() ? "unknown error" : error;
  std::vector<int64_t> message(static_cast<size_t>(kHeaderWords) + (text.size() + kWord - 1) / kWord);
  message[0] = static_cast<int64_t>(text.size());
  message[1] = tables;
  std::memcpy(message.data() + kHeaderWords, text.data(), text.size());
  return message;
}

AskedKeys ReadKeysMessage(const int64_t* message, int64_t words, int64_t tables) {
  if (words < kHeaderWords) ThrowMalformed(words, tables, "it is too short");
  AskedKeys asked;
  if (message[0] != 0) {
    if (message[0] < 0 || message[0] > (words - kHeaderWords) * kWord) {
      ThrowMalformed(words, tables, "its error text is longer than it is");
    }
    asked.error.assign(reinterpret_cast<const char*>(message + kHeaderWords),
                       static_cast<size_t>(message[0]));
    return asked;
  }
  if (message[1] != tables) {
    ThrowMalformed(words, tables, "it is of " + std::to_string(message[1]) + " tables");
  }
  int64_t left = words - KeysMessageWords(tables, 0);
  asked.counts = message + kHeaderWords;
  for (int64_t t = 0; t < tables && left >= 0; ++t) {
    if (asked.counts[t] < 0) ThrowMalformed(words, tables, "a number of keys is negative");
    left = asked.counts[t] > left ? -1 : left - asked.counts[t];
  }
  if (left != 0) ThrowMalformed(words, tables, "it has other than the number of keys that it says");
  asked.keys = asked.counts + tables;
  return asked;
}

}  // namespace kvtable
