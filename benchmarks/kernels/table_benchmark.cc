// How fast the table engine is, against what the memory system allows; prints one JSON object.
//
//   table_benchmark [--threads N] [--repetitions N] [--only lookup|counts|write|insert|overhead|remove|expire|changes|
//                                                       steps]
//                   [--rows N] [--most-rows N]
//
// "Bare" is a gather by known row number from one array on huge pages, with prefetch, threads and copy
// routine as in the table: what remains of a lookup when nothing has to be looked up. Bare and table take
// turns on the same batches, so that whatever else the machine does meets both; ratios are medians over the
// turns, rates the best turn.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "kvtable/optimizer.h"
#include "kvtable/parallel_for.h"
#include "kvtable/table.h"
#include "line_transfer.h"
#include "memory/copy_rows.h"
#include "memory/huge_pages.h"
#include "threads/run_tasks.h"

namespace kvtable {
namespace {

constexpr int64_t kBatch = 65536;
constexpr int64_t kSmallBatch = 1024;
constexpr int64_t kAhead = 32;

struct Flags {
  int threads = 2;
  int repetitions = 9;
  int64_t rows = 2'000'000;
  int64_t insert_rows = 10'000'000;
  int64_t most_rows = 10'000'000;  // of `counts`
  std::string only;
};

double Seconds(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double Median(std::vector<double> numbers) {
  std::sort(numbers.begin(), numbers.end());
  return numbers[numbers.size() / 2];
}
double Best(const std::vector<double>& numbers) { return *std::max_element(numbers.begin(), numbers.end()); }

uint64_t KeyOfRow(int64_t row) { return Mix64(static_cast<uint64_t>(row) + 0x1234567); }

std::unique_ptr<Table> MakeTable(int64_t dim) {
  TableOptions options;
  options.dim = dim;
  options.initializer.a = 0.5;
  return Table::Create(options);
}

// Calls body(begin, count) for [0, rows) in batches.
void ForBatches(int64_t rows, int64_t batch, const std::function<void(int64_t, int64_t)>& body) {
  for (int64_t begin = 0; begin < rows; begin += batch) body(begin, std::min(batch, rows - begin));
}

void GatherBare(const char* array, int64_t row_bytes, const uint32_t* rows, int64_t n, char* out,
                ParallelFor& threads) {
  const Ranges ranges(n, 2048, threads);
  RunTasks(threads, ranges.count(), [&](int64_t r) {
    VisitRowBytes(row_bytes, [&](auto known) {
      constexpr int64_t kBytes = decltype(known)::value;
      const int64_t end = ranges.end(r);
      for (int64_t i = ranges.begin(r); i < end; ++i) {
        if (i + kAhead < end) PrefetchRow<kBytes>(array + rows[i + kAhead] * row_bytes, row_bytes);
        CopyRow<kBytes>(out + i * row_bytes, array + rows[i] * row_bytes, row_bytes);
      }
    });
  });
}

class Json {
 public:
  Json() { std::printf("{\n"); }
  ~Json() { std::printf("\n}\n"); }
  void Add(const std::string& name, double value) {
    std::printf("%s  \"%s\": %.4g", first_ ? "" : ",\n", name.c_str(), value);
    std::fflush(stdout);
    first_ = false;
  }

 private:
  bool first_ = true;
};

void Lookups(const Flags& flags, ParallelFor& threads, Json* json) {
  for (const int64_t dim : {int64_t{16}, int64_t{64}, int64_t{128}}) {
    const int64_t row_bytes = dim * 4;
    const int64_t lookups = kBatch * 16;
    const auto table = MakeTable(dim);
    const Region array(static_cast<size_t>(flags.rows * row_bytes), Pages::kHuge, "the benchmark's array");
    std::vector<uint64_t> keys(static_cast<size_t>(flags.rows));
    for (int64_t i = 0; i < flags.rows; ++i) keys[static_cast<size_t>(i)] = KeyOfRow(i);
    for (int64_t i = 0; i < flags.rows * dim; ++i) {
      reinterpret_cast<float*>(array.data())[i] = static_cast<float>(i % 1000003);
    }
    ForBatches(flags.rows, kBatch, [&](int64_t begin, int64_t n) {
      table->Upsert(keys.data() + begin, n, array.data() + begin * row_bytes, {1, 1}, threads);
    });
    std::vector<uint32_t> rows(static_cast<size_t>(lookups));
    std::vector<uint64_t> wanted(static_cast<size_t>(lookups));
    for (int64_t i = 0; i < lookups; ++i) {
      const uint64_t row = Mix64(static_cast<uint64_t>(i) ^ 0xabcdef) % static_cast<uint64_t>(flags.rows);
      rows[static_cast<size_t>(i)] = static_cast<uint32_t>(row);
      wanted[static_cast<size_t>(i)] = keys[row];
    }
    std::vector<char> out(static_cast<size_t>(kBatch * row_bytes));
    for (const int64_t batch : {kSmallBatch, kBatch}) {
      std::vector<double> bare;
      std::vector<double> gather;
      std::vector<double> ratio;
      for (int rep = 0; rep < flags.repetitions; ++rep) {
        bare.push_back(1e-6 * static_cast<double>(lookups) / Seconds([&] {
                         ForBatches(lookups, batch, [&](int64_t begin, int64_t n) {
                           GatherBare(array.data(), row_bytes, rows.data() + begin, n, out.data(), threads);
                         });
                       }));
        gather.push_back(1e-6 * static_cast<double>(lookups) / Seconds([&] {
                           ForBatches(lookups, batch, [&](int64_t begin, int64_t n) {
                             table->Gather(wanted.data() + begin, n, out.data(), Missing::kZeros, nullptr, 0,
                                           nullptr, threads);
                           });
                         }));
        ratio.push_back(gather.back() / bare.back());
      }
      // The last batch: the table gives what the array holds.
      for (int64_t i = 0; i < batch; ++i) {
        if (std::memcmp(out.data() + i * row_bytes,
                        array.data() + rows[static_cast<size_t>(lookups - batch + i)] * row_bytes,
                        static_cast<size_t>(row_bytes)) != 0) {
          std::fprintf(stderr, "wrong row %lld\n", static_cast<long long>(i));
          std::exit(1);
        }
      }
      const std::string name = "_dim" + std::to_string(dim) + "_batch" + std::to_string(batch);
      json->Add("bare_mrows_per_s" + name, Best(bare));
      json->Add("gather_mrows_per_s" + name, Best(gather));
      json->Add("gather_to_bare" + name, Median(ratio));
    }
  }
}

// Lookups of narrow rows, of which there are many: what a key costs a thread, beside a bare gather from as many rows.
void RowCounts(const Flags& flags, Json* json) {
  constexpr int64_t kDim = 2;
  constexpr int64_t kRowBytes = kDim * 4;
  const auto pool = MakeThreadPool(flags.threads);
  for (int64_t count = 100'000; count <= flags.most_rows; count *= 10) {
    const auto table = MakeTable(kDim);
    const Region array(static_cast<size_t>(count * kRowBytes), Pages::kHuge, "the benchmark's array");
    for (int64_t i = 0; i < count * kDim; ++i)
      reinterpret_cast<float*>(array.data())[i] = static_cast<float>(i);
    std::vector<uint64_t> keys(static_cast<size_t>(kBatch));
    ForBatches(count, kBatch, [&](int64_t begin, int64_t n) {
      for (int64_t i = 0; i < n; ++i) keys[static_cast<size_t>(i)] = KeyOfRow(begin + i);
      table->Upsert(keys.data(), n, array.data() + begin * kRowBytes, {1, 1}, *pool);
    });
    const int64_t lookups = kBatch * 16;
    std::vector<uint32_t> rows(static_cast<size_t>(lookups));
    std::vector<uint64_t> wanted(static_cast<size_t>(lookups));
    for (int64_t i = 0; i < lookups; ++i) {
      const uint64_t row = Mix64(static_cast<uint64_t>(i) ^ 0xabcdef) % static_cast<uint64_t>(count);
      rows[static_cast<size_t>(i)] = static_cast<uint32_t>(row);
      wanted[static_cast<size_t>(i)] = KeyOfRow(static_cast<int64_t>(row));
    }
    std::vector<char> out(static_cast<size_t>(kBatch * kRowBytes));
    for (ParallelFor* const threads : {&Serial(), pool.get()}) {
      std::vector<double> bare, gather;
      for (int rep = 0; rep < flags.repetitions; ++rep) {
        const double each = 1e9 * threads->threads() / static_cast<double>(lookups);
        bare.push_back(each * Seconds([&] {
                         ForBatches(lookups, kBatch, [&](int64_t begin, int64_t n) {
                           GatherBare(array.data(), kRowBytes, rows.data() + begin, n, out.data(), *threads);
                         });
                       }));
        gather.push_back(each * Seconds([&] {
                           ForBatches(lookups, kBatch, [&](int64_t begin, int64_t n) {
                             table->Gather(wanted.data() + begin, n, out.data(), Missing::kZeros, nullptr, 0,
                                           nullptr, *threads);
                           });
                         }));
      }
      const std::string name =
          "_ns_of_" + std::to_string(count) + "_rows_threads" + std::to_string(threads->threads());
      json->Add("bare" + name, Median(bare));
      json->Add("gather" + name, Median(gather));
    }
  }
}

void Writes(const Flags& flags, ParallelFor& threads, Json* json) {
  for (const int64_t dim : {int64_t{16}, int64_t{64}}) {
    const auto table = MakeTable(dim);
    const int64_t lookups = kBatch * 16;
    std::vector<uint64_t> keys(static_cast<size_t>(flags.rows));
    for (int64_t i = 0; i < flags.rows; ++i) keys[static_cast<size_t>(i)] = KeyOfRow(i);
    std::vector<float> values(static_cast<size_t>(kBatch * dim), 0.25f);
    std::vector<float> out(static_cast<size_t>(kBatch * dim));
    ForBatches(flags.rows, kBatch, [&](int64_t begin, int64_t n) {
      table->Upsert(keys.data() + begin, n, values.data(), {1, 1}, threads);
    });
    std::vector<uint64_t> wanted(static_cast<size_t>(lookups));
    for (int64_t i = 0; i < lookups; ++i) {
      wanted[static_cast<size_t>(i)] = keys[Mix64(static_cast<uint64_t>(i) ^ 0xabcdef) % keys.size()];
    }
    struct Operation {
      const char* name;
      std::function<void(const uint64_t*, int64_t)> run;
      std::vector<double> rates;
    };
    std::vector<Operation> operations = {
        {"gather",
         [&](const uint64_t* k, int64_t n) {
           table->Gather(k, n, out.data(), Missing::kZeros, nullptr, 0, nullptr, threads);
         },
         {}},
        {"gather_or_insert_hits",
         [&](const uint64_t* k, int64_t n) {
           table->GatherOrInsert(k, n, out.data(), {1, 2}, nullptr, threads);
         },
         {}},
        {"upsert",
         [&](const uint64_t* k, int64_t n) { table->Upsert(k, n, values.data(), {1, 2}, threads); },
         {}},
        {"accumulate",
         [&](const uint64_t* k, int64_t n) {
           table->Accumulate(k, n, values.data(), false, {1, 2}, threads);
         },
         {}},
    };
    for (int rep = 0; rep < flags.repetitions; ++rep) {
      for (Operation& operation : operations) {
        const double seconds = Seconds([&] {
          ForBatches(lookups, kBatch,
                     [&](int64_t begin, int64_t n) { operation.run(wanted.data() + begin, n); });
        });
        operation.rates.push_back(1e-6 * static_cast<double>(lookups) / seconds);
      }
    }
    for (const Operation& operation : operations) {
      json->Add(std::string(operation.name) + "_mrows_per_s_dim" + std::to_string(dim),
                Best(operation.rates));
    }
  }
}

void Inserts(const Flags& flags, ParallelFor& threads, Json* json) {
  const int64_t dim = 16;
  std::vector<uint64_t> keys(static_cast<size_t>(flags.insert_rows));
  for (int64_t i = 0; i < flags.insert_rows; ++i) keys[static_cast<size_t>(i)] = KeyOfRow(i);
  std::vector<float> values(static_cast<size_t>(kBatch * dim), 0.25f);
  std::vector<double> by_lookup;
  std::vector<double> by_upsert;
  for (int rep = 0; rep < 4; ++rep) {
    for (const bool first : {true, false}) {
      const bool upsert = first == (rep % 2 != 0);  // whoever comes second finds the system's pages warm
      const auto table = MakeTable(dim);
      const double seconds = Seconds([&] {
        ForBatches(flags.insert_rows, kBatch, [&](int64_t begin, int64_t n) {
          if (upsert) {
            table->Upsert(keys.data() + begin, n, values.data(), {1, 1}, threads);
          } else {
            table->GatherOrInsert(keys.data() + begin, n, values.data(), {1, 1}, nullptr, threads);
          }
        });
      });
      (upsert ? by_upsert : by_lookup).push_back(1e-6 * static_cast<double>(flags.insert_rows) / seconds);
    }
  }
  json->Add("insert_by_gather_or_insert_mrows_per_s_dim16", Best(by_lookup));
  json->Add("insert_by_gather_or_insert_mrows_per_s_dim16_median", Median(by_lookup));
  json->Add("insert_by_upsert_mrows_per_s_dim16", Best(by_upsert));
  json->Add("insert_by_upsert_mrows_per_s_dim16_median", Median(by_upsert));
}

// Rows that go, of a table of each of two sizes: taken out by their keys, in an order that is not theirs; the half
// that was touched longest ago, as `Variable.restrict` finds it by a table of its own with a number for each
// key; and evicted, one for each new key, from a table that is full.
void Removals(const Flags& flags, ParallelFor& threads, Json* json) {
  constexpr int64_t kDim = 16;
  const std::vector<float> values(static_cast<size_t>(kBatch * kDim), 0.25f);
  for (const int64_t count : {int64_t{800'000}, int64_t{4'000'000}}) {
    std::vector<uint64_t> keys(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) keys[static_cast<size_t>(i)] = KeyOfRow(i);
    std::vector<uint64_t> shuffled = keys;
    for (size_t i = shuffled.size() - 1; i > 0; --i) std::swap(shuffled[i], shuffled[Mix64(i) % (i + 1)]);
    const auto fill = [&](Table* table) {
      ForBatches(count, kBatch, [&](int64_t begin, int64_t n) {
        table->Upsert(keys.data() + begin, n, values.data(), {1, 1}, threads);
      });
    };
    const auto remove = [&](Table* table, const uint64_t* gone, int64_t n) {
      ForBatches(n, kBatch, [&](int64_t begin, int64_t m) { table->Remove(gone + begin, m, threads); });
    };
    std::vector<double> removed;
    std::vector<double> restricted;
    std::vector<double> evicted;
    const double millions = 1e-6 * static_cast<double>(count);
    for (int rep = 0; rep < std::min(flags.repetitions, 3); ++rep) {
      const auto table = MakeTable(kDim);
      fill(table.get());
      removed.push_back(millions / Seconds([&] { remove(table.get(), shuffled.data(), count); }));

      TableOptions numbers;
      numbers.dim = 1;
      numbers.value_type = ValueType::kInt32;
      const auto status = Table::Create(numbers);
      std::vector<int32_t> number(static_cast<size_t>(count));
      for (int64_t i = 0; i < count; ++i) {
        number[static_cast<size_t>(i)] = static_cast<int32_t>(Mix64(static_cast<uint64_t>(i)) >> 40);
      }
      ForBatches(count, kBatch, [&](int64_t begin, int64_t n) {
        status->Upsert(keys.data() + begin, n, number.data() + begin, {}, threads);
      });
      fill(table.get());
      restricted.push_back(millions / 2 / Seconds([&] {
                             std::vector<std::pair<int32_t, uint64_t>> known;
                             std::vector<uint64_t> chunk(static_cast<size_t>(kBatch));
                             std::vector<int32_t> of_chunk(static_cast<size_t>(kBatch));
                             const auto there = std::make_unique<bool[]>(static_cast<size_t>(kBatch));
                             Exporter::Buffers out;
                             out.keys = chunk.data();
                             out.columns = {{0, of_chunk.data(), 1}};
                             const auto exporter = status->Export();
                             for (int64_t n; (n = exporter->Next(kBatch, out, threads)) > 0;) {
                               table->Contains(chunk.data(), n, there.get(), threads);
                               for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
                                 if (there[i]) known.emplace_back(of_chunk[i], chunk[i]);
                               }
                             }
                             std::nth_element(known.begin(), known.begin() + count / 2, known.end());
                             std::vector<uint64_t> lowest(static_cast<size_t>(count / 2));
                             for (size_t i = 0; i < lowest.size(); ++i) lowest[i] = known[i].second;
                             remove(table.get(), lowest.data(), count / 2);
                             remove(status.get(), lowest.data(), count / 2);
                           }));
      if (table->Size() != count - count / 2) {
        std::fprintf(stderr, "%lld rows are left\n", static_cast<long long>(table->Size()));
        std::exit(1);
      }

      TableOptions bounded;
      bounded.dim = kDim;
      bounded.max_capacity = count;
      const auto full = Table::Create(bounded);
      fill(full.get());
      std::vector<uint64_t> news(keys.size());
      for (int64_t i = 0; i < count; ++i) news[static_cast<size_t>(i)] = KeyOfRow(count + i);
      std::vector<float> rows(static_cast<size_t>(kBatch * kDim));
      evicted.push_back(millions / Seconds([&] {
                          ForBatches(count, kBatch, [&](int64_t begin, int64_t n) {
                            full->GatherOrInsert(news.data() + begin, n, rows.data(), {1, 1}, nullptr,
                                                 threads);
                          });
                        }));
    }
    const std::string name = "_mrows_per_s_of_" + std::to_string(count);
    json->Add("remove" + name, Best(removed));
    json->Add("restrict" + name, Best(restricted));
    json->Add("evict" + name, Best(evicted));
  }
}

// Half of the rows go by each policy, and as many come again: rows that went per second, and the memory that the
// table has after that, to what it had full for the first time.
void Expiries(const Flags& flags, ParallelFor& threads, Json* json) {
  using Kind = EvictPolicy::Kind;
  constexpr int64_t kDim = 32;
  const int64_t count = flags.insert_rows;
  TableOptions options;
  options.dim = kDim;
  options.expiry.unit = AgeUnit::kSteps;
  options.expiry.max_age = 1000;
  const auto table = Table::Create(options);
  std::vector<uint64_t> keys(static_cast<size_t>(kBatch));
  std::vector<float> rows(static_cast<size_t>(kBatch * kDim));
  std::vector<uint32_t> freqs(static_cast<size_t>(kBatch)), versions(static_cast<size_t>(kBatch));
  int64_t next_row = 0;
  uint32_t step = 2000;
  const auto bytes = [&] {
    const MemoryUse use = table->Memory();
    return static_cast<double>(use.row_bytes + use.slack_bytes + use.index_bytes + use.column_bytes);
  };
  // Rows in no order of what they go by; those that come later take the places of the low ones that went.
  const auto fill = [&] {
    ForBatches(count - table->Size(), kBatch, [&](int64_t, int64_t n) {
      for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
        keys[i] = KeyOfRow(next_row++);
        const bool low = next_row > count || (Mix64(keys[i]) >> 20 & 1) != 0;
        freqs[i] = low ? 1 : 9;
        versions[i] = low ? step - 900 : step - 1;
        std::fill_n(rows.begin() + static_cast<int64_t>(i) * kDim, kDim, low ? 0.1f : 1.0f);
      }
      table->Import(keys.data(), n, {{0, rows.data(), kDim}}, freqs.data(), versions.data(), nullptr,
                    threads);
    });
  };
  const auto evict = [&](const std::string& name, const EvictPolicy& policy) {
    const int64_t before = table->Size();
    const double seconds = Seconds([&] { Evict(table.get(), policy, threads); });
    const int64_t gone = before - table->Size();
    if (gone < before / 3) {
      std::fprintf(stderr, "%lld rows went by %s\n", static_cast<long long>(gone), name.c_str());
      std::exit(1);
    }
    json->Add("expire_by_" + name + "_mrows_per_s_of_" + std::to_string(count),
              1e-6 * static_cast<double>(gone) / seconds);
  };
  table->SetStep(step);
  fill();
  const double full = bytes();
  evict("age", {Kind::kAfterSteps, 500, 0, {}});
  fill();
  evict("frequency", {Kind::kBelowFrequency, 5, 0, {}});
  fill();
  evict("norm", {Kind::kBelowNorm, 0, 2.0, {}});
  fill();
  evict("top_frequency", {Kind::kKeepTop, count / 2, 0, RankBy::kFrequency});
  fill();
  evict("top_norm", {Kind::kKeepTop, count / 2, 0, RankBy::kNorm});
  fill();
  json->Add("expire_memory_after_five_refills_to_first", bytes() / full);
}

// What it costs a step of Adam that its table tracks changes, and that an export of one moment is open; how long cuts
// take. Three tables take turns on the same batches.
void Changes(const Flags& flags, ParallelFor& threads, Json* json) {
  constexpr int64_t kDim = 32;
  constexpr int64_t kSteps = 16;
  const int64_t count = flags.rows / 2;
  std::vector<uint64_t> keys(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) keys[static_cast<size_t>(i)] = KeyOfRow(i);
  const std::vector<float> gradients(static_cast<size_t>(kBatch * kDim), 0.25f);
  const auto make = [&] {
    TableOptions options;
    options.dim = kDim;
    options.slots = {{"m", kDim, SlotSpec::Init::kConstant, 0.0},
                     {"v", kDim, SlotSpec::Init::kConstant, 0.0}};
    auto table = Table::Create(options);
    ForBatches(count, kBatch, [&](int64_t begin, int64_t n) {
      table->Upsert(keys.data() + begin, n, gradients.data(), {1, 1}, threads);
    });
    return table;
  };
  const auto plain = make();
  const auto tracked = make();
  const auto exported = make();
  tracked->TrackChanges(1 << 20);
  exported->TrackChanges(1 << 20);
  const Update adam =
      MakeUpdate("adam", {{"learning_rate", 0.01}, {"beta_1_power", 0.9}, {"beta_2_power", 0.999}});
  std::vector<uint64_t> wanted(static_cast<size_t>(kBatch * kSteps));
  const auto steps = [&](Table* table) {
    return 1e-6 * static_cast<double>(kBatch * kSteps) / Seconds([&] {
             ForBatches(kBatch * kSteps, kBatch, [&](int64_t begin, int64_t n) {
               table->Apply(wanted.data() + begin, nullptr, n, gradients.data(), adam, {{1, 2}}, {1, 2},
                            threads);
             });
           });
  };
  std::vector<double> off, on, aside, on_ratio, aside_ratio, cut, increment, rows_a_second;
  uint64_t version = tracked->CutChanges();
  std::vector<float> out(static_cast<size_t>(kBatch * kDim * 3));
  std::vector<uint64_t> out_keys(static_cast<size_t>(kBatch));
  for (int rep = 0; rep < flags.repetitions; ++rep) {
    for (size_t i = 0; i < wanted.size(); ++i) {
      wanted[i] = keys[Mix64(i + wanted.size() * static_cast<size_t>(rep)) % keys.size()];
    }
    MomentOptions options;
    options.aside = std::make_shared<AsideMemory>(int64_t{8} << 30);
    const auto open = exported->ExportMoment(options);
    off.push_back(steps(plain.get()));
    on.push_back(steps(tracked.get()));
    aside.push_back(steps(exported.get()));
    on_ratio.push_back(on.back() / off.back());
    aside_ratio.push_back(aside.back() / off.back());
    cut.push_back(1e6 * Seconds([&] { tracked->CutChanges(); }));
    version = tracked->CutChanges();
    tracked->ForgetChanges(version);
    tracked->Upsert(wanted.data(), 50000, gradients.data(), {1, 3}, threads);
    options.since = version;
    std::unique_ptr<Exporter> changed;
    increment.push_back(1e6 * Seconds([&] { changed = tracked->ExportMoment(options); }));
    Exporter::Buffers buffers;
    buffers.keys = out_keys.data();
    buffers.columns = {{0, out.data(), kDim},
                       {1, out.data() + kBatch * kDim, kDim},
                       {2, out.data() + 2 * kBatch * kDim, kDim}};
    int64_t rows = 0;
    const double seconds = Seconds([&] {
      for (int64_t n; (n = changed->Next(kBatch, buffers, threads)) > 0;) rows += n;
    });
    rows_a_second.push_back(1e-6 * static_cast<double>(rows) / seconds);
  }
  json->Add("apply_mrows_per_s_dim32", Best(off));
  json->Add("apply_tracked_mrows_per_s_dim32", Best(on));
  json->Add("apply_tracked_to_untracked", Median(on_ratio));
  json->Add("apply_beside_open_moment_to_untracked", Median(aside_ratio));
  json->Add("cut_microseconds", Median(cut));
  json->Add("begin_increment_of_50000_microseconds", Median(increment));
  json->Add("read_increment_mrows_per_s", Median(rows_a_second));
}

// The overhead swings with growth, so besides the two sizes the largest on the way is given, from a million
// rows on.
void Overhead(const Flags& flags, ParallelFor& threads, Json* json) {
  const auto table = MakeTable(16);
  std::vector<uint64_t> keys(static_cast<size_t>(kBatch));
  std::vector<float> out(static_cast<size_t>(kBatch * 16));
  double worst = 0;
  ForBatches(flags.insert_rows, kBatch, [&](int64_t begin, int64_t n) {
    for (int64_t i = 0; i < n; ++i) keys[static_cast<size_t>(i)] = KeyOfRow(begin + i);
    table->GatherOrInsert(keys.data(), n, out.data(), {1, 1}, nullptr, threads);
    const double overhead = table->Memory().overhead_per_row();
    if (begin >= 1'000'000) worst = std::max(worst, overhead);
    if (begin < 2'000'000 && begin + n >= 2'000'000) json->Add("overhead_bytes_per_row_at_2m", overhead);
  });
  json->Add("overhead_bytes_per_row_at_10m", table->Memory().overhead_per_row());
  json->Add("overhead_bytes_per_row_worst_from_1m", worst);
}

// Lookup, a gradient that each of two threads makes half of in place, update: microseconds of each, medians, and of a
// cache line's way from one processor to the other before and after.
void Steps(const Flags& flags, ParallelFor& threads, Json* json) {
  constexpr int64_t kBatches = 16;
  constexpr int kSteps = 100;
  constexpr double kZipf = 1.05;
  const int64_t rows = std::max(flags.rows / 2, kBatch);
  std::vector<uint64_t> keys(static_cast<size_t>(rows));
  std::vector<double> most(keys.size());  // of Zipf's law: the weights of all keys up to this one
  double total = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i] = KeyOfRow(static_cast<int64_t>(i));
    most[i] = total += std::pow(static_cast<double>(i) + 1, -kZipf);
  }
  const auto is_drawn = [&](int64_t i) {
    const double at = total * static_cast<double>(Mix64(static_cast<uint64_t>(i) ^ 0xabcdef) >> 11) * 0x1p-53;
    return keys[static_cast<size_t>(std::lower_bound(most.begin(), most.end(), at) - most.begin())];
  };
  for (const bool zipf : {false, true}) {
    std::vector<uint64_t> wanted(static_cast<size_t>(kBatches * kBatch));
    for (int64_t i = 0; i < kBatches * kBatch; ++i) {
      // A prime's multiples, so that a batch repeats none.
      const uint64_t place = static_cast<uint64_t>(i) * 611'953 % static_cast<uint64_t>(rows);
      wanted[static_cast<size_t>(i)] = zipf ? is_drawn(i) : keys[place];
    }
    for (const int64_t dim : {int64_t{16}, int64_t{64}}) {
      for (const bool adam : {false, true}) {
        const auto table = MakeTable(dim);
        if (adam) table->EnsureSlots({{"m", dim}, {"v", dim}}, threads);
        const std::vector<float> values(static_cast<size_t>(kBatch * dim), 0.25f);
        ForBatches(rows, kBatch, [&](int64_t begin, int64_t n) {
          table->Upsert(keys.data() + begin, n, values.data(), {1, 1}, threads);
        });
        const Update update =
            adam
                ? MakeUpdate("adam", {{"learning_rate", 1e-6}, {"beta_1_power", 0.9}, {"beta_2_power", 0.99}})
                : MakeUpdate("sgd", {{"learning_rate", 1e-6}});
        const SlotColumns slots(adam ? std::vector<int>{1, 2} : std::vector<int>{},
                                table->schema().generation);
        // As the op has it: on huge pages.
        const Region output(static_cast<size_t>(kBatch * dim) * sizeof(float), Pages::kHuge, "rows");
        float* const found = reinterpret_cast<float*>(output.data());
        std::vector<uint64_t> positions(static_cast<size_t>(kBatch));
        std::vector<double> lookup, apply;
        const double before = LineTransferNanoseconds(20'000);
        for (int step = 0; step < kSteps; ++step) {
          const uint64_t* const batch = wanted.data() + step % kBatches * kBatch;
          lookup.push_back(1e6 * Seconds([&] {
                             table->GatherOrInsert(batch, kBatch, RowsOut(found, positions.data()), {1, 2},
                                                   threads);
                           }));
          const int64_t half = kBatch * dim / 2;
          RunTasks(threads, 2, [&](int64_t part) {
            float* const gradient = found + part * half;
            for (int64_t i = 0; i < half; ++i) gradient[i] *= 2;
          });
          apply.push_back(1e6 * Seconds([&] {
                            table->Apply(batch, positions.data(), kBatch, found, update, slots, {1, 2},
                                         threads);
                          }));
        }
        const std::string name = std::string("_us_") + (adam ? "adam" : "sgd") + "_dim" +
                                 std::to_string(dim) + (zipf ? "_zipf" : "_unique");
        json->Add("step_lookup" + name, Median(lookup));
        json->Add("step_apply" + name, Median(apply));
        json->Add("line_transfer_ns_before_" + name.substr(4), before);
        json->Add("line_transfer_ns_after_" + name.substr(4), LineTransferNanoseconds(20'000));
      }
    }
  }
}

int Main(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--threads") flags.threads = std::atoi(argv[i + 1]);
    if (name == "--repetitions") flags.repetitions = std::atoi(argv[i + 1]);
    if (name == "--only") flags.only = argv[i + 1];
    if (name == "--rows") flags.rows = std::atoll(argv[i + 1]);
    if (name == "--most-rows") flags.most_rows = std::atoll(argv[i + 1]);
  }
  const auto threads = MakeThreadPool(flags.threads);
  Json json;
  json.Add("threads", flags.threads);
  const auto wanted = [&](const char* name) { return flags.only.empty() || flags.only == name; };
  if (wanted("lookup")) Lookups(flags, *threads, &json);
  if (wanted("counts")) RowCounts(flags, &json);
  if (wanted("write")) Writes(flags, *threads, &json);
  if (wanted("insert")) Inserts(flags, *threads, &json);
  if (wanted("remove")) Removals(flags, *threads, &json);
  if (wanted("expire")) Expiries(flags, *threads, &json);
  if (wanted("changes")) Changes(flags, *threads, &json);
  if (wanted("overhead")) Overhead(flags, *threads, &json);
  if (wanted("steps")) Steps(flags, *threads, &json);
  return 0;
}

}  // namespace
}  // namespace kvtable

int main(int argc, char** argv) { return kvtable::Main(argc, argv); }
