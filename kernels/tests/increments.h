// What increments have to be, for tables on the CPU and in device memory alike: base and increments are the table.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "check.h"
#include "kvtable/optimizer.h"
#include "kvtable/table.h"
#include "pool.h"
#include "throws.h"

namespace kvtable {

constexpr int64_t kDim = 6;
inline const SlotSpec kSlot = {"accumulator", kDim, SlotSpec::Init::kConstant, 0.5};
inline const SlotSpec kOther = {"other", 2, SlotSpec::Init::kConstant, 3.0};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(Mix64(seed)) {}
  uint64_t Next(uint64_t below) { return Mix64(++state_) % below; }

 private:
  uint64_t state_;
};

// All that is kept of a row, to the bit.
using Rows = std::map<int64_t, std::vector<uint32_t>>;

inline uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

// Takes all that comes, in chunks of `chunk`; after each of them calls between().
template <class Between>
void ReadInto(Exporter* exporter, const RowSchema& schema, int64_t chunk, ParallelFor& threads, Rows* rows,
              const Between& between) {
  std::vector<int64_t> keys(static_cast<size_t>(chunk));
  std::vector<uint32_t> freqs(keys.size());
  std::vector<uint32_t> versions(keys.size());
  std::vector<uint64_t> scores(keys.size());
  std::vector<uint64_t> orders(keys.size());
  std::vector<std::vector<float>> columns;
  Exporter::Buffers out{keys.data(), freqs.data(), versions.data(), scores.data(), orders.data(), {}};
  std::vector<int64_t> widths = {kDim};
  for (const SlotSpec& slot : schema.slots) widths.push_back(slot.width);
  for (size_t c = 0; c < widths.size(); ++c) {
    columns.emplace_back(static_cast<size_t>(chunk * widths[c]));
    out.columns.push_back({static_cast<int>(c), columns[c].data(), widths[c], schema.generation});
  }
  for (int64_t n; (n = exporter->Next(chunk, out, threads)) > 0; between()) {
    for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
      std::vector<uint32_t> row = {freqs[i], versions[i], static_cast<uint32_t>(scores[i]),
                                   static_cast<uint32_t>(scores[i] >> 32), static_cast<uint32_t>(orders[i])};
      for (size_t c = 0; c < widths.size(); ++c) {
        const size_t width = static_cast<size_t>(widths[c]);
        for (size_t j = 0; j < width; ++j) row.push_back(Bits(columns[c][i * width + j]));
      }
      CHECK(rows->emplace(keys[i], std::move(row)).second);  // no key comes twice
    }
  }
}

inline Rows Contents(Table* table) {
  Rows rows;
  ReadInto(table->Export().get(), table->schema(), 1000, Pool(), &rows, [] {});
  return rows;
}

inline std::set<int64_t> RemovedKeys(const Exporter& exporter) {
  std::vector<int64_t> keys(static_cast<size_t>(exporter.removed_rows()));
  exporter.RemovedKeys(keys.data());
  CHECK(std::set<int64_t>(keys.begin(), keys.end()).size() == keys.size());
  return {keys.begin(), keys.end()};
}

inline void ApplyIncrement(const Rows& changed, const std::set<int64_t>& removed, Rows* base) {
  for (const int64_t key : removed) base->erase(key);
  for (const auto& [key, row] : changed) (*base)[key] = row;
}

// One write of any kind to some of `key_range` keys.
inline void WriteSomething(Table* table, Random* random, uint64_t key_range) {
  const int64_t n = static_cast<int64_t>(random->Next(60)) + 1;
  std::vector<int64_t> keys(static_cast<size_t>(n));
  std::vector<float> values(static_cast<size_t>(n * kDim));
  std::vector<uint64_t> scores(keys.size());
  std::vector<uint32_t> stamps(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i] = static_cast<int64_t>(random->Next(key_range)) - 100;
    scores[i] = random->Next(1000);
    stamps[i] = static_cast<uint32_t>(random->Next(1000));
    for (size_t j = 0; j < kDim; ++j) values[i * kDim + j] = static_cast<float>(random->Next(1 << 20));
  }
  const Stamp stamp = {1, static_cast<uint32_t>(random->Next(1u << 30))};
  switch (random->Next(9)) {
    case 0:
      table->Upsert(keys.data(), n, values.data(), stamp, Pool());
      break;
    case 1:
      table->UpsertColumns(keys.data(), n, {{1, values.data(), kDim}}, stamp, Pool());
      break;
    case 2:
      table->Accumulate(keys.data(), n, values.data(), false, stamp, Pool());
      break;
    case 3:
      table->Import(keys.data(), n, {{0, values.data(), kDim}, {1, values.data(), kDim}}, stamps.data(),
                    stamps.data(), table->max_capacity() == 0 ? nullptr : scores.data(), Pool());
      break;
    case 4:
      table->GatherOrInsert(keys.data(), n, values.data(), stamp, nullptr, Pool());
      break;
    case 5:
    case 6:
      table->Remove(keys.data(), n, Pool());
      break;
    case 7: {
      Update update = MakeUpdate("adagrad", {{"learning_rate", 0.5}});
      update.skip_nonfinite = true;
      if (random->Next(2) == 0) values[0] = static_cast<float>(1.0 / 0.0);  // this row is touched alone
      table->Apply(keys.data(), nullptr, n, values.data(), update, {{1}}, stamp, Pool());
      break;
    }
    default:
      if (table->max_capacity() > 0 && table->eviction() == Eviction::kCustom) {
        table->SetScores(keys.data(), n, scores.data(), Pool());
      }
  }
}

// Base and increments are, at each cut, what the table was, whatever is written while they are being read.
inline void IncrementsAreTheTable(Table* table, uint64_t seed) {
  Random random(seed);
  const uint64_t key_range = 300 + random.Next(2000);
  for (int i = 0; i < 20; ++i) WriteSomething(table, &random, key_range);
  table->TrackChanges(1 << 20);
  MomentOptions full;
  full.cut = true;
  Rows base;
  uint64_t version = 0;
  for (int round = 0; round < 12; ++round) {
    const bool is_full = round == 0;
    MomentOptions options = full;
    if (!is_full) options.since = version;
    const Rows before = base;
    const Rows at_cut = Contents(table);
    const auto exporter = table->ExportMoment(options);
    Rows changed;
    ReadInto(exporter.get(), table->schema(), 1 + static_cast<int64_t>(random.Next(100)), Pool(), &changed,
             [&] {
               if (random.Next(3) != 0) WriteSomething(table, &random, key_range);
             });
    const std::set<int64_t> removed = RemovedKeys(*exporter);
    if (is_full) {
      CHECK(changed == at_cut && removed.empty());
    } else {
      std::set<int64_t> gone;
      int64_t new_keys = 0;
      for (const auto& entry : before) {
        if (at_cut.count(entry.first) == 0) gone.insert(entry.first);
      }
      for (const auto& entry : at_cut) new_keys += before.count(entry.first) == 0 ? 1 : 0;
      CHECK(removed == gone);
      CHECK(exporter->born_rows() >= new_keys);
      CHECK(exporter->born_rows() <= static_cast<int64_t>(changed.size()));
    }
    ApplyIncrement(changed, removed, &base);
    CHECK(base == at_cut);
    CHECK(exporter->max_rows() >= 0);
    // Now and then an increment is lost on its way, and the next one goes from the version before it.
    if (is_full || random.Next(4) != 0) {
      version = exporter->version();
      if (random.Next(2) == 0) table->ForgetChanges(version);
    } else {
      base = before;
    }
    for (uint64_t i = random.Next(8); i > 0; --i) WriteSomething(table, &random, key_range);
  }
}

// In a table without rows; tracking takes `most_bytes` at most then.
inline void AnIncrementHoldsWhatChangedAndNoMore(Table* table, int64_t most_bytes) {
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < 50000; ++key) keys.push_back(key);
  const std::vector<float> values(keys.size() * kDim, 1.0f);
  table->Upsert(keys.data(), 50000, values.data(), {1, 1}, Pool());
  const uint64_t begin = table->TrackChanges(100);
  CHECK(table->TrackChanges(5) == begin);  // it goes on
  const int64_t off = table->Memory().column_bytes;
  std::vector<float> out(keys.size() * kDim);
  table->GatherOrInsert(keys.data(), 50000, out.data(), {1, 1}, nullptr,
                        Pool());  // reads rows that are there
  table->Upsert(keys.data() + 7, 3, values.data(), {}, Pool());
  table->Remove(keys.data() + 20, 2, Pool());
  table->Upsert(keys.data() + 20, 1, values.data(), {}, Pool());  // is back
  const int64_t more[] = {-1, -2};
  table->Upsert(more, 2, values.data(), {}, Pool());
  table->Remove(more + 1, 1, Pool());  // came and went
  MomentOptions options;
  options.since = begin;
  const auto exporter = table->ExportMoment(options);
  CHECK(exporter->version() > begin);
  Rows rows;
  ReadInto(exporter.get(), table->schema(), 100, Pool(), &rows, [] {});
  std::set<int64_t> changed;
  for (const auto& entry : rows) changed.insert(entry.first);
  CHECK((changed == std::set<int64_t>{-1, 7, 8, 9, 20}));
  CHECK((RemovedKeys(*exporter) == std::set<int64_t>{21}));
  CHECK(exporter->born_rows() == 2);
  CHECK(table->Memory().column_bytes - off < most_bytes);
}

inline void WhatIsNotKnownIsSaid(Table* table, Table* other) {
  const std::vector<int64_t> keys = {1, 2, 3, 4};
  const std::vector<float> values(4 * kDim);
  const auto increment = [&](uint64_t since) {
    MomentOptions options;
    options.since = since;
    return table->ExportMoment(options)->version();
  };
  const auto failed = [&](uint64_t since, const char* part) {
    CHECK(table->ChangesLost(since).find(part) != std::string::npos);
    CHECK(Throws(ErrorCode::kFailedPrecondition, part, [&] { increment(since); }));
  };
  failed(1, "are not tracked");
  CHECK(Throws(ErrorCode::kFailedPrecondition, "not tracked", [&] { table->CutChanges(); }));
  CHECK(Throws(ErrorCode::kInvalidArgument, "max_removed of -1", [&] { table->TrackChanges(-1); }));
  const uint64_t begin = table->TrackChanges(2);
  CHECK(table->ChangesLost(begin).empty());
  failed(begin + 1, "no such version");
  failed(begin - 1, "another table");
  table->Upsert(keys.data(), 4, values.data(), {}, Pool());
  const uint64_t cut = table->CutChanges();
  CHECK(cut > begin && table->ChangesLost(cut).empty() && table->ChangesLost(begin).empty());

  table->Remove(keys.data(), 3, Pool());
  failed(cut, "more than 2 rows were removed");
  const uint64_t after = increment(table->CutChanges());  // from then on all is known again
  failed(cut, "more than 2 rows were removed");
  table->ForgetChanges(after);
  failed(cut, "told to forget");
  table->Upsert(keys.data(), 2, values.data(), {}, Pool());
  const uint64_t there = table->CutChanges();
  table->Remove(keys.data(), 2, Pool());  // there is room again
  CHECK(table->ChangesLost(there).empty());
  table->ForgetChanges(there + 1000);  // is none of its versions
  CHECK(table->ChangesLost(there).empty());

  table->Clear();
  failed(there, "was cleared");
  const uint64_t cleared = table->CutChanges();
  CHECK(table->EnsureSlots({kSlot}, Pool()) == table->generation());  // nothing changes
  CHECK(table->ChangesLost(cleared).empty());
  table->EnsureSlots({kOther, kSlot}, Pool());
  failed(cleared, "slots changed");
  const uint64_t oldest = table->CutChanges();
  for (int i = 0; i < Table::kMostVersions; ++i) table->CutChanges();
  CHECK(table->ChangesLost(oldest).empty());
  table->CutChanges();
  failed(oldest, "8 versions");

  CHECK(other->TrackChanges(1) > table->CutChanges() - 2);
  CHECK(!other->ChangesLost(table->CutChanges()).empty());
}

}  // namespace kvtable
