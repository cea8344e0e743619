// How fast a table on a CUDA device is, beside what the device's memory allows; prints one JSON object.
//
//   device_table_benchmark [--millions N] [--batch N] [--dims 8,32,64]
//
// The method is the one HierarchicalKV's benchmark uses, so that numbers can be held against its table:
// 64-bit keys and float32 rows; the table is filled with consecutive keys to a part of the rows it has room
// for; a timed batch has 60% keys of the batch inserted last and 40% that are not there, all different; nine
// warm-ups; the time is one call and a wait for its stream, the better of two. Beside it: batches of new keys
// only, of hits all over the table, and of keys after Zipf's law (exponent 1.05), where some occur very
// often.
//
// "bytes" is the least that an operation must move: keys, one 64-byte bucket for each, rows read and written.
// "roofline" is how much of the measured bandwidth of a device-to-device copy that comes to.
#include <cuda_runtime.h>

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
#include <vector>

#include "hash.h"
#include "kvtable/device_table.h"

namespace kvtable {
namespace {

void Check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "device_table_benchmark: %s\n", cudaGetErrorString(status));
  std::exit(1);
}

// An array in device memory.
template <class T>
class Array {
 public:
  explicit Array(int64_t n) : n_(n) {
    Check(cudaMalloc(reinterpret_cast<void**>(&data_), static_cast<size_t>(n) * sizeof(T)));
    Check(cudaMemset(data_, 0, static_cast<size_t>(n) * sizeof(T)));
  }
  ~Array() { cudaFree(data_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  void Set(const std::vector<T>& from) {
    Check(cudaMemcpy(data_, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  T* data() const { return data_; }
  int64_t size() const { return n_; }

 private:
  T* data_ = nullptr;
  int64_t n_;
};

double Seconds(const std::function<void()>& queue) {
  Check(cudaDeviceSynchronize());
  const auto begin = std::chrono::steady_clock::now();
  queue();
  Check(cudaStreamSynchronize(nullptr));
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Bytes read and written per second.
double CopyBandwidth() {
  constexpr size_t kBytes = size_t{2} << 30;
  Array<char> from(kBytes);
  Array<char> to(kBytes);
  double best = 1e9;
  for (int i = 0; i < 10; ++i) {
    best =
        std::min(best, Seconds([&] {
                   Check(cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, nullptr));
                 }));
  }
  return 2.0 * static_cast<double>(kBytes) / best;
}

class Benchmark {
 public:
  Benchmark(int64_t dim, int64_t rows, int64_t batch, double bandwidth)
      : dim_(dim),
        rows_(rows),
        batch_(batch),
        bandwidth_(bandwidth),
        keys_(batch),
        values_(batch * dim),
        found_(batch) {
    DeviceTableOptions options;
    options.name = "benchmark";
    options.key_type = KeyType::kUint64;
    options.dim = dim;
    table_ = MakeCudaTable(options);
    table_->Reserve(rows, 2 * batch, nullptr);
  }

  void Run(double load) {
    Fill(static_cast<int64_t>(load * static_cast<double>(rows_)));
    const double n = static_cast<double>(batch_);
    const double row = static_cast<double>(dim_) * 4;
    const auto mixed = [&](int64_t run) { return MixedKeys(run); };
    Report(load, "find", mixed, n * (8 + 64 + 0.6 * row + row), [&] { Find(); });
    Report(load, "find*", mixed, n * (8 + 64 + 8),
           [&] { table_->Pointers(Batch(true), reinterpret_cast<void**>(values_.data()), nullptr); });
    Report(
        load, "find, hits all over", [&](int64_t run) { return RandomHits(run); }, n * (8 + 64 + 2 * row),
        [&] { Find(); });
    Report(load, "find, Zipf", [&](int64_t run) { return ZipfKeys(run); }, 0, [&] { Find(); });
    Report(
        load, "accumulate, Zipf", [&](int64_t run) { return ZipfKeys(run); }, 0,
        [&] { table_->Accumulate(Batch(false), values_.data(), true, {1, 1}, nullptr); });
    // These insert: what they added goes again, so that the load stays.
    Report(
        load, "insert_or_assign", mixed, n * (8 + 64 + 2 * row + 0.4 * 64),
        [&] { table_->Upsert(Batch(true), values_.data(), {1, 1}, nullptr); }, true);
    Report(
        load, "insert_or_assign, may repeat", mixed, n * (8 + 64 + 2 * row + 0.4 * 64),
        [&] { table_->Upsert(Batch(false), values_.data(), {1, 1}, nullptr); }, true);
    Report(
        load, "find_or_insert", mixed, n * (8 + 64 + 2 * row + 0.4 * (64 + row)),
        [&] { table_->GatherOrInsert(Batch(true), values_.data(), {1, 1}, nullptr, nullptr); }, true);
    Report(
        load, "insert, all new", [&](int64_t run) { return NewKeys(run); }, n * (8 + 64 + 64 + 2 * row),
        [&] { table_->Upsert(Batch(true), values_.data(), {1, 1}, nullptr); }, true);
    Report(
        load, "find_or_insert, Zipf", [&](int64_t run) { return ZipfKeys(run); }, 0,
        [&] { table_->GatherOrInsert(Batch(false), values_.data(), {1, 1}, nullptr, nullptr); });
  }

  void Memory() const {
    const DeviceMemoryUse use = table_->Memory();
    std::printf(
        ",\n  {\"dim\": %lld, \"operation\": \"memory\", \"rows\": %lld, \"overhead_bytes_per_row\": %.2f}",
        static_cast<long long>(dim_), static_cast<long long>(use.rows),
        static_cast<double>(use.index_bytes + use.column_bytes) / static_cast<double>(use.rows));
  }

 private:
  using Keys = std::vector<uint64_t>;

  DeviceKeys Batch(bool distinct) const { return {keys_.data(), batch_, distinct}; }

  void Find() {
    table_->Gather(Batch(false), values_.data(), Missing::kZeros, nullptr, 0, found_.data(), nullptr);
  }

  void Fill(int64_t rows) {
    Keys keys(static_cast<size_t>(batch_));
    while (filled_ < rows) {
      const int64_t n = std::min(batch_, rows - filled_);
      for (int64_t i = 0; i < n; ++i) keys[static_cast<size_t>(i)] = static_cast<uint64_t>(filled_ + i);
      keys_.Set(keys);
      table_->Upsert({keys_.data(), n, true}, values_.data(), {1, 1}, nullptr);
      Check(cudaDeviceSynchronize());
      filled_ += n;
    }
  }

  Keys NewKeys(int64_t run) const {
    Keys keys(static_cast<size_t>(batch_));
    for (size_t i = 0; i < keys.size(); ++i)
      keys[i] = (uint64_t{1} << 40) + static_cast<uint64_t>(run * batch_) + i;
    return keys;
  }
  Keys MixedKeys(int64_t run) const {
    Keys keys = NewKeys(run);
    const size_t hits = keys.size() * 6 / 10;
    for (size_t i = 0; i < hits; ++i) keys[i] = static_cast<uint64_t>(filled_) - keys.size() + i;
    Shuffle(&keys, run);
    return keys;
  }
  Keys RandomHits(int64_t run) const {
    Keys keys(static_cast<size_t>(batch_));
    for (size_t i = 0; i < keys.size(); ++i) {
      keys[i] = Mix64(static_cast<uint64_t>(run) << 40 | i) % static_cast<uint64_t>(filled_);
    }
    return keys;
  }
  Keys ZipfKeys(int64_t run) const {
    // The inverse of the distribution function of the continuous law.
    constexpr double kExponent = 1.05;
    const double most = std::pow(static_cast<double>(filled_), 1 - kExponent);
    Keys keys(static_cast<size_t>(batch_));
    for (size_t i = 0; i < keys.size(); ++i) {
      const double u = static_cast<double>(Mix64(static_cast<uint64_t>(run) << 40 | i) >> 11) * 0x1p-53;
      const double rank = std::pow(1 - u * (1 - most), 1 / (1 - kExponent));
      keys[i] = Mix64(static_cast<uint64_t>(rank)) % static_cast<uint64_t>(filled_);
    }
    return keys;
  }
  static void Shuffle(Keys* keys, int64_t run) {
    for (size_t i = keys->size() - 1; i > 0; --i) {
      std::swap((*keys)[i], (*keys)[Mix64(static_cast<uint64_t>(run) << 40 | i) % (i + 1)]);
    }
  }

  void Report(double load, const char* operation, const std::function<Keys(int64_t)>& make, double bytes,
              const std::function<void()>& queue, bool inserts = false) {
    double best = 1e9;
    for (int64_t run = 0; run < 11; ++run) {
      keys_.Set(make(inserts ? ++runs_ : run));
      const double seconds = Seconds(queue);
      if (run >= 9) best = std::min(best, seconds);
      if (!inserts) continue;
      table_->Remove(Batch(false), nullptr);
      Refill();
    }
    const double rate = static_cast<double>(batch_) / best;
    std::printf(
        ",\n  {\"dim\": %lld, \"rows\": %lld, \"load\": %.2f, \"operation\": \"%s\", \"keys_per_second\": "
        "%.4g, "
        "\"hkv_unit\": %.3f",
        static_cast<long long>(dim_), static_cast<long long>(rows_), load, operation, rate,
        rate / (1024.0 * 1024.0 * 1024.0));
    if (bytes > 0) std::printf(", \"bytes\": %.4g, \"roofline\": %.3f", bytes, bytes / best / bandwidth_);
    std::printf("}");
    std::fflush(stdout);
  }

  // Puts the keys back that the removal of a mixed batch took along.
  void Refill() {
    const int64_t rows = filled_;
    filled_ = std::max(int64_t{0}, filled_ - batch_);
    Fill(rows);
  }

  int64_t dim_;
  int64_t rows_;
  int64_t batch_;
  double bandwidth_;
  Array<uint64_t> keys_;
  Array<float> values_;
  Array<bool> found_;
  std::unique_ptr<DeviceTable> table_;
  int64_t filled_ = 0;
  int64_t runs_ = 0;
};

int Main(int argc, char** argv) {
  int64_t millions = 64;
  int64_t batch = 1 << 20;
  std::vector<int64_t> dims = {8, 32, 64};
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--millions") == 0) millions = std::atoll(argv[i + 1]);
    if (std::strcmp(argv[i], "--batch") == 0) batch = std::atoll(argv[i + 1]);
    if (std::strcmp(argv[i], "--dims") == 0) {
      dims.clear();
      for (const char* at = argv[i + 1]; *at != '\0';) {
        char* end = nullptr;
        dims.push_back(std::strtoll(at, &end, 10));
        at = *end == ',' ? end + 1 : end;
      }
    }
  }
  cudaDeviceProp device;
  Check(cudaGetDeviceProperties(&device, 0));
  const double bandwidth = CopyBandwidth();
  std::printf(
      "{\"device\": \"%s\", \"copy_bytes_per_second\": %.4g, \"batch\": %lld, \"results\": [\n  "
      "{\"operation\": "
      "\"copy\"}",
      device.name, bandwidth, static_cast<long long>(batch));
  for (const int64_t dim : dims) {
    Benchmark benchmark(dim, millions * 1000000, batch, bandwidth);
    for (const double load : {0.5, 0.75, 1.0}) benchmark.Run(load);
    benchmark.Memory();
  }
  std::printf("\n]}\n");
  return 0;
}

}  // namespace
}  // namespace kvtable

int main(int argc, char** argv) {
  try {
    return kvtable::Main(argc, argv);
  } catch (const kvtable::Error& error) {
    std::fprintf(stderr, "device_table_benchmark: %s\n", error.what());
    return 1;
  }
}
