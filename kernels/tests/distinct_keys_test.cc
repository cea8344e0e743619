// Keys in order of which one they are, against a map: batches without repetitions, with few, and with little else.
#include "lookups/distinct_keys.h"

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "base/hash.h"
#include "check.h"

namespace kvtable {
namespace {

void AgreesWithAMap(const std::vector<uint64_t>& keys) {
  const uint32_t n = static_cast<uint32_t>(keys.size());
  std::vector<uint32_t> order(n);
  std::vector<uint32_t> begins(n + 2);
  const uint32_t distinct = OrderByKey(keys.data(), n, order.data(), begins.data());
  std::unordered_map<uint64_t, size_t> numbers;
  std::vector<std::vector<uint32_t>> occurrences;
  for (uint32_t i = 0; i < n; ++i) {
    const auto [it, is_first] = numbers.emplace(keys[i], occurrences.size());
    if (is_first) occurrences.emplace_back();
    occurrences[it->second].push_back(i);
  }
  std::vector<uint32_t> wanted_order;
  std::vector<uint32_t> wanted_begins = {0};
  for (const std::vector<uint32_t>& of_key : occurrences) {
    wanted_order.insert(wanted_order.end(), of_key.begin(), of_key.end());
    wanted_begins.push_back(static_cast<uint32_t>(wanted_order.size()));
  }
  CHECK(distinct == occurrences.size());
  CHECK(order == wanted_order);
  begins.resize(distinct + 1);
  CHECK(begins == wanted_begins);
}

// `n` keys, of which every `every`-th is drawn among the first `among`; 0: all are different.
std::vector<uint64_t> Keys(uint32_t n, uint32_t every, uint32_t among) {
  std::vector<uint64_t> keys(n);
  for (uint32_t i = 0; i < n; ++i) {
    const bool drawn = every != 0 && i % every == 0;
    keys[i] = Mix64(drawn ? Mix64(i) % among : i);
  }
  return keys;
}

void Draws() {
  for (const uint32_t n : {0u, 1u, 2u, 63u, 1024u, 1025u, 8192u, 70000u}) {
    AgreesWithAMap(Keys(n, 0, 0));
    for (const uint32_t every : {1u, 2u, 7u, 100u, 5000u}) {
      for (const uint32_t among : {1u, 10u, 4000u}) AgreesWithAMap(Keys(n, every, among));
    }
  }
}

// Where the table of numbers becomes one of 32 bits.
void MostKeysOf16Bits() {
  for (const uint32_t n : {65533u, 65534u, 65535u, 65536u}) {
    std::vector<uint64_t> keys = Keys(n, 0, 0), found(n);
    keys.back() = keys.front();
    uint32_t wanted = 0;
    const uint32_t count =
        NumberDistinctKeys(keys.data(), n, found.data(), [&](uint32_t i, uint32_t number, bool first) {
          CHECK(first == (i < n - 1) && number == (first ? wanted++ : 0));
        });
    CHECK(count == n - 1 && count == wanted);
    found.resize(count);
    keys.pop_back();
    CHECK(found == keys);
  }
}

// Repetitions that come late, when few are expected any more.
void RepeatsAtTheEnd() {
  std::vector<uint64_t> keys = Keys(8192, 0, 0);
  for (size_t i = 4096; i < keys.size(); ++i) keys[i] = keys[i - 4096];
  AgreesWithAMap(keys);
}

// Keys whose marks are the same although they differ, in ones and twos.
void SharedMarks() {
  std::vector<uint64_t> keys = Keys(2048, 0, 0);
  for (uint64_t i = 0; i < 64; ++i) keys[i * 32 + 5] = keys[i * 32];
  for (uint64_t i = 0; i < 64; ++i) keys[i * 32 + 7] = keys[i * 32 + 9] + 1;
  AgreesWithAMap(keys);
  for (uint64_t i = 0; i < keys.size(); ++i) keys[i] = i % 2 == 0 ? i << 40 : ~(i << 40);
  AgreesWithAMap(keys);
}

}  // namespace
}  // namespace kvtable

int main() {
  kvtable::Draws();
  kvtable::MostKeysOf16Bits();
  kvtable::RepeatsAtTheEnd();
  kvtable::SharedMarks();
  return 0;
}
