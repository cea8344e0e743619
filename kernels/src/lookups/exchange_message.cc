#include "kvtable/exchange_message.h"

#include <cstring>

#include "kvtable/types.h"

namespace kvtable {
namespace {

constexpr int64_t kErrorHeaderWords = 2;
constexpr int64_t kHeaderWords = 4;
constexpr int64_t kWord = sizeof(int64_t);

int64_t WordsOf(int64_t bytes) { return bytes / kWord + (bytes % kWord == 0 ? 0 : 1); }

[[noreturn]] void ThrowMalformed(int64_t words, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument,
              "a message of " + std::to_string(words) + " words does not ask for rows: " + what + ".");
}

}  // namespace

int64_t KeysMessageWords(int64_t tables, int64_t keys, int64_t text_bytes) {
  return kHeaderWords + tables + WordsOf(text_bytes) + keys;
}

int64_t* WriteKeysHeader(const std::vector<int64_t>& counts, uint64_t lookup, const std::string& text,
                         int64_t* message) {
  const int64_t tables = static_cast<int64_t>(counts.size());
  const int64_t bytes = static_cast<int64_t>(text.size());
  message[0] = 0;
  message[1] = tables;
  message[2] = static_cast<int64_t>(lookup);
  message[3] = bytes;
  int64_t* next = message + kHeaderWords;
  for (int64_t count : counts) *next++ = count;
  if (bytes > 0) {
    next[WordsOf(bytes) - 1] = 0;
    std::memcpy(next, text.data(), text.size());
  }
  return next + WordsOf(bytes);
}

std::vector<int64_t> ErrorMessage(const std::string& error, int64_t tables) {
  const std::string text = error.empty() ? "unknown error" : error;
  const int64_t bytes = static_cast<int64_t>(text.size());
  std::vector<int64_t> message(static_cast<size_t>(kErrorHeaderWords + WordsOf(bytes)));
  message[0] = bytes;
  message[1] = tables;
  std::memcpy(message.data() + kErrorHeaderWords, text.data(), text.size());
  return message;
}

AskedKeys ReadKeysMessage(const int64_t* message, int64_t words) {
  if (words < kErrorHeaderWords) ThrowMalformed(words, "it is too short");
  AskedKeys asked;
  if (message[0] != 0) {
    if (message[0] < 0 || message[0] > (words - kErrorHeaderWords) * kWord) {
      ThrowMalformed(words, "its error text is longer than it is");
    }
    asked.error.assign(reinterpret_cast<const char*>(message + kErrorHeaderWords),
                       static_cast<size_t>(message[0]));
    return asked;
  }
  if (words < kHeaderWords) ThrowMalformed(words, "it is too short");
  int64_t left = words - kHeaderWords;
  asked.tables = message[1];
  asked.lookup = static_cast<uint64_t>(message[2]);
  if (asked.tables < 0 || asked.tables > left)
    ThrowMalformed(words, "it is of more tables than it has words");
  left -= asked.tables;
  const int64_t bytes = message[3];
  if (bytes < 0 || WordsOf(bytes) > left) ThrowMalformed(words, "the text in it is longer than it is");
  left -= WordsOf(bytes);
  asked.counts = message + kHeaderWords;
  asked.text.assign(reinterpret_cast<const char*>(asked.counts + asked.tables), static_cast<size_t>(bytes));
  for (int64_t t = 0; t < asked.tables && left >= 0; ++t) {
    if (asked.counts[t] < 0) ThrowMalformed(words, "a number of keys is negative");
    left = asked.counts[t] > left ? -1 : left - asked.counts[t];
  }
  if (left != 0) ThrowMalformed(words, "it has other than the number of keys that it says");
  asked.keys = asked.counts + asked.tables + WordsOf(bytes);
  return asked;
}

}  // namespace kvtable
