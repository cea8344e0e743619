// Pooled lookups and their gradients against plain loops over copies of the rows, to the bit, with each instruction set.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "base/hash.h"
#include "check.h"
#include "kvtable/parallel_for.h"
#include "kvtable/pool_rows.h"
#include "kvtable/sum_by_key.h"
#include "training/sum_rows.h"

namespace kvtable {
namespace {

// Ids in bags: some bags are empty, some have one id, one has more ids than are looked up at a time. Few keys are many
// of the ids.
struct Ids {
  std::vector<int64_t> keys;
  std::vector<int64_t> splits = {0};
  std::vector<double> weights;

  explicit Ids(size_t bags, int64_t among) {
    for (size_t b = 0; b < bags; ++b) {
      const size_t count = b == 7 ? 3000 : b % 5 == 0 ? 0 : b % 3 == 0 ? 1 : Mix64(b) % 23;
      for (size_t i = 0; i < count; ++i) {
        const uint64_t draw = Mix64(keys.size() + 1);
        keys.push_back(static_cast<int64_t>(draw % 3 == 0 ? draw % 7 : draw % static_cast<uint64_t>(among)) -
                       3);
        weights.push_back(draw % 11 == 0 ? 0.0 : static_cast<double>(draw % 1000) / 500 - 1);
      }
      splits.push_back(static_cast<int64_t>(keys.size()));
    }
  }
  int64_t bags() const { return static_cast<int64_t>(splits.size()) - 1; }
  int64_t n() const { return static_cast<int64_t>(keys.size()); }
};

template <class Compute>
std::vector<Compute> As(const std::vector<double>& from) {
  return std::vector<Compute>(from.begin(), from.end());
}

BagsInput InputOf(const Ids& ids, ValueType type, const void* weights) {
  BagsInput in;
  in.value_type = type;
  in.keys = ids.keys.data();
  in.n = ids.n();
  in.bags = ids.bags();
  in.splits = ids.splits.data();
  in.weights = weights;
  return in;
}

std::unique_ptr<Table> MakeTable(ValueType type, int64_t dim) {
  TableOptions options;
  options.value_type = type;
  options.dim = dim;
  options.initializer.kind = Initializer::Kind::kNormal;
  options.shards = 8;
  return Table::Create(options);
}

template <class T>
void Pools(ValueType type, int64_t dim, bool weighted, Combiner combiner, bool insert, Missing missing,
           ParallelFor& threads) {
  using Compute = ComputeOf<T>;
  const Ids ids(300, 4000);
  const std::vector<Compute> weights = As<Compute>(ids.weights);
  const auto table = MakeTable(type, dim);
  std::vector<int64_t> there;
  for (int64_t key = -3; key < 2500; key += 2) there.push_back(key);
  std::vector<T> rows(static_cast<size_t>(ids.n() * dim));
  table->GatherOrInsert(there.data(), static_cast<int64_t>(there.size()), rows.data(), Stamp{}, nullptr,
                        Serial());
  const int64_t before = table->lookup_counts().keys;

  const Bags bags(InputOf(ids, type, weighted ? weights.data() : nullptr));
  std::vector<T> pooled(static_cast<size_t>(ids.bags() * dim));
  MissingKeys missing_keys;
  missing_keys.insert = insert;
  missing_keys.missing = missing;
  PoolRows({{{table.get()}, &bags, combiner, pooled.data(), missing_keys}}, threads);
  if (insert) CHECK(table->lookup_counts().keys == before + ids.n());

  table->Gather(ids.keys.data(), ids.n(), rows.data(), insert ? Missing::kInitial : missing, nullptr, 0,
                nullptr, Serial());
  for (int64_t b = 0; b < ids.bags(); ++b) {
    std::vector<Compute> sum(static_cast<size_t>(dim));
    for (int64_t i = ids.splits[b]; i < ids.splits[b + 1]; ++i) {
      for (int64_t j = 0; j < dim; ++j) {
        const Compute x = Element<T>::Load(rows[i * dim + j]);
        sum[j] += weighted ? weights[i] * x : x;
      }
    }
    std::vector<T> wanted(static_cast<size_t>(dim));
    StoreQuotient(sum.data(), bags.Divisor<Compute>(b, combiner), dim, wanted.data());
    if (!weighted && ids.splits[b + 1] == ids.splits[b] + 1) {
      std::copy_n(rows.data() + ids.splits[b] * dim, dim, wanted.data());
    }
    CHECK(std::memcmp(wanted.data(), pooled.data() + b * dim, static_cast<size_t>(dim) * sizeof(T)) == 0);
  }
  CHECK(table->Size() >= static_cast<int64_t>(there.size()));
  if (insert) {
    std::vector<char> found(static_cast<size_t>(ids.n()));
    table->Contains(ids.keys.data(), ids.n(), reinterpret_cast<bool*>(found.data()), Serial());
    CHECK(std::count(found.begin(), found.end(), 1) == ids.n());
  } else {
    CHECK(table->Size() == static_cast<int64_t>(there.size()));
  }
}

template <class T>
void Sums(ValueType type, int64_t dim, size_t bag_count, int64_t parts, bool weighted, Combiner combiner,
          ParallelFor& threads) {
  using Compute = ComputeOf<T>;
  const Ids ids(bag_count, 20000);
  const std::vector<Compute> weights = As<Compute>(ids.weights);
  const Bags bags(InputOf(ids, type, weighted ? weights.data() : nullptr));
  std::vector<T> gradient(static_cast<size_t>(ids.bags() * dim));
  for (size_t i = 0; i < gradient.size(); ++i) {
    gradient[i] = Element<T>::FromDouble(static_cast<double>(Mix64(i) % 2001) / 1000 - 1);
  }
  const SumByKey by_key({{&bags, combiner, parts, dim, gradient.data()}}, threads);
  std::vector<std::vector<int64_t>> keys;
  std::vector<std::vector<T>> rows;
  std::vector<SumByKey::Share> shares;
  for (int64_t p = 0; p < parts; ++p) {
    keys.emplace_back(static_cast<size_t>(by_key.count(0, p)));
    // What is there before must not count.
    rows.emplace_back(keys.back().size() * static_cast<size_t>(dim), Element<T>::FromDouble(std::nan("")));
  }
  for (int64_t p = 0; p < parts; ++p) shares.push_back({keys[p].data(), rows[p].data()});
  by_key.Write({shares}, threads);

  std::map<int64_t, std::vector<Compute>> wanted;
  for (int64_t b = 0; b < ids.bags(); ++b) {
    const Compute divisor = bags.Divisor<Compute>(b, combiner);
    for (int64_t i = ids.splits[b]; i < ids.splits[b + 1]; ++i) {
      const auto [it, is_first] = wanted.emplace(ids.keys[i], std::vector<Compute>(static_cast<size_t>(dim)));
      if (divisor == 0) continue;
      const Compute scale = (weighted ? weights[i] : 1) / divisor;
      for (int64_t j = 0; j < dim; ++j) {
        const Compute term = scale * Element<T>::Load(gradient[b * dim + j]);
        it->second[j] = is_first ? term : it->second[j] + term;
      }
    }
  }
  size_t count = 0;
  for (int64_t p = 0; p < parts; ++p) {
    for (size_t k = 0; k < keys[p].size(); ++k, ++count) {
      CHECK((keys[p][k] % parts + parts) % parts == p);
      const auto it = wanted.find(keys[p][k]);
      CHECK(it != wanted.end());
      for (int64_t j = 0; j < dim; ++j) {
        const T want = Element<T>::Store(it->second[j]);
        CHECK(std::memcmp(&want, &rows[p][k * static_cast<size_t>(dim) + static_cast<size_t>(j)],
                          sizeof(T)) == 0);
      }
    }
  }
  CHECK(count == wanted.size());
}

template <class T>
void OfType(ValueType type, ParallelFor& threads) {
  for (const int64_t dim : {1, 3, 4, 8, 13, 16, 24, 32, 70}) {
    Pools<T>(type, dim, false, Combiner::kMean, true, Missing::kZeros, threads);
    Pools<T>(type, dim, true, Combiner::kSqrtN, false, Missing::kInitial, threads);
    Sums<T>(type, dim, 300, 1, false, Combiner::kMean, threads);
    Sums<T>(type, dim, 300, 3, true, Combiner::kSum, threads);
  }
  Pools<T>(type, 16, false, Combiner::kSum, false, Missing::kZeros, threads);
  Pools<T>(type, 16, true, Combiner::kMean, true, Missing::kZeros, threads);
  Sums<T>(type, 4, 12000, 1, false, Combiner::kSqrtN, threads);  // sorted
  Sums<T>(type, 4, 300, 1, true, Combiner::kMean, threads);
}

// Splits that are found in one pass, and those of ids in no order.
void SplitsOfIndices() {
  for (const bool in_order : {true, false}) {
    std::vector<int64_t> indices;
    std::vector<int64_t> keys;
    for (int64_t i = 0; i < 100; ++i) {
      const int64_t bag = in_order ? i / 7 * 2 : static_cast<int64_t>(Mix64(static_cast<uint64_t>(i)) % 30);
      indices.insert(indices.end(), {bag, i % 7});
      keys.push_back(i);
    }
    const std::vector<int64_t> shape = {31, 7};
    BagsInput in;
    in.keys = keys.data();
    in.n = 100;
    in.bags = 31;
    in.indices = indices.data();
    in.rank = 2;
    in.shape = shape.data();
    const Bags bags(in);
    CHECK(bags.ids() == 100);
    for (int64_t b = 0; b < 31; ++b) {
      for (int64_t i = bags.begin(b); i < bags.end(b); ++i) {
        CHECK(indices[static_cast<size_t>(bags.source(i)) * 2] == b);
        CHECK(reinterpret_cast<const int64_t*>(bags.keys())[i] == keys[bags.source(i)]);
        if (i > bags.begin(b)) CHECK(bags.source(i) > bags.source(i - 1));
      }
    }
  }
}

void All() {
  const auto threads = MakeThreadPool(3);
  OfType<float>(ValueType::kFloat32, *threads);
  OfType<double>(ValueType::kFloat64, *threads);
  OfType<Float16>(ValueType::kFloat16, *threads);
  OfType<BFloat16>(ValueType::kBFloat16, *threads);
  SplitsOfIndices();
}

}  // namespace
}  // namespace kvtable

int main() {
  for (const char* const isa : {"baseline", "avx2", "avx512"}) {
    const pid_t child = fork();  // the library chooses once in a process
    if (child == 0) {
      setenv("KVTABLE_ISA", isa, 1);
      kvtable::All();
      return 0;
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  return 0;
}
