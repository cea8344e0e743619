#include "kvtable/exchange_agreement.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>

#include "base/hash.h"

namespace kvtable {
namespace {

// As many as a program has calls of a lookup: few.
struct KnownLookups {
  std::mutex mutex;
  std::map<uint64_t, std::string> texts;  // by hash
};

KnownLookups& Known() {
  static KnownLookups* const known = new KnownLookups;  // threads may still run when the process ends
  return *known;
}

std::vector<std::string> LinesOf(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// The line that differs first; for a text that ends before, how many tables it is of.
std::string LineOrEnd(const std::vector<std::string>& lines, size_t at) {
  if (at < lines.size()) return lines[at];
  const size_t tables = lines.empty() ? 0 : lines.size() - 1;
  return "only " + std::to_string(tables) + (tables == 1 ? " table" : " tables");
}

}  // namespace

uint64_t HashOfLookup(const std::string& text) {
  uint64_t hash = Mix64(text.size());
  for (size_t at = 0; at < text.size(); at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + at, std::min(sizeof(word), text.size() - at));
    hash = Mix64(hash ^ word) + at;
  }
  return hash;
}

bool IsKnownLookup(uint64_t hash) {
  KnownLookups& known = Known();
  const std::lock_guard<std::mutex> lock(known.mutex);
  return known.texts.count(hash) > 0;
}

void RememberLookup(uint64_t hash, const std::string& text) {
  KnownLookups& known = Known();
  const std::lock_guard<std::mutex> lock(known.mutex);
  known.texts.emplace(hash, text);
}

std::string DifferenceOfLookups(const std::vector<uint64_t>& of_ranks) {
  const auto other =
      std::find_if(of_ranks.begin(), of_ranks.end(), [&](uint64_t hash) { return hash != of_ranks[0]; });
  if (other == of_ranks.end()) return "";
  const std::string rank = "rank " + std::to_string(other - of_ranks.begin());
  KnownLookups& known = Known();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const auto here = known.texts.find(of_ranks[0]), there = known.texts.find(*other);
  if (here == known.texts.end() || there == known.texts.end()) return rank + " looks up something else";
  const std::vector<std::string> first = LinesOf(here->second), second = LinesOf(there->second);
  size_t at = 0;
  while (at < first.size() && at < second.size() && first[at] == second[at]) ++at;
  return "rank 0 has " + LineOrEnd(first, at) + ", " + rank + " has " + LineOrEnd(second, at);
}

}  // namespace kvtable
