// A training step on tables in device memory, stage by stage, beside what the device's memory allows; prints
// one JSON object.
//
//   training_step_benchmark [--tables 26] [--dim 32] [--rows 1000000] [--batch 65536]
//
// Each table gives the rows of a batch of ids, inserting those that are missing, and is updated by Adam with
// a gradient for each of them: those of equal ids are summed first. torch_step.py does the same step with
// dense embeddings in PyTorch. The model between the two is left out on both sides: the gradients are what
// the lookup gave.
//
// "bytes" is the least that a stage must move: for each id its key and its row out or its gradient in; for
// each id that is different its 64-byte bucket and its row, which Adam reads and writes with both moments and
// 8 bytes of stamps. "roofline" is how much of the measured bandwidth of a copy within the device's memory
// that comes to. Seconds are medians.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "benchmark_device.h"
#include "benchmark_ids.h"
#include "kvtable/device_table.h"
#include "kvtable/optimizer.h"

namespace kvtable {
namespace {

constexpr int kWarmUps = 3;
constexpr int kTimed = 15;
constexpr int kBatches = 4;  // that take turns

struct Sizes {
  int64_t tables = 26;
  int64_t dim = 32;
  int64_t rows = 1000000;  // of each table
  int64_t batch = 65536;
};

using Ids = std::vector<uint64_t>(size_t n, uint64_t rows, uint64_t seed);

// The ids of one table in one batch.
std::vector<uint64_t> IdsOf(Ids* make, const Sizes& sizes, int64_t table, int batch) {
  return make(static_cast<size_t>(sizes.batch), static_cast<uint64_t>(sizes.rows),
              static_cast<uint64_t>(table * kBatches + batch));
}

double Median(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  return std::max(seconds[seconds.size() / 2], 1e-9);
}

class TrainingStep {
 public:
  TrainingStep(const Sizes& sizes, double bandwidth)
      : sizes_(sizes), bandwidth_(bandwidth), rows_(sizes.tables * sizes.batch * sizes.dim) {
    for (int64_t t = 0; t < sizes.tables; ++t) {
      DeviceTableOptions options;
      options.name = "table " + std::to_string(t);
      options.key_type = KeyType::kUint64;
      options.dim = sizes.dim;
      options.initializer.kind = Initializer::Kind::kUniform;
      options.initializer.a = -0.05;
      options.initializer.b = 0.05;
      options.slots = {{"m", sizes.dim, SlotSpec::Init::kConstant, 0.0},
                       {"v", sizes.dim, SlotSpec::Init::kConstant, 0.0}};
      tables_.push_back(MakeTable(options));
      tables_.back()->Reserve(sizes.rows + sizes.batch, sizes.batch, nullptr);
    }
    Fill();
  }

  void Run(const char* name, Ids* make) {
    std::vector<std::unique_ptr<DeviceArray<uint64_t>>> batches;
    double distinct = 0;
    uint64_t checksum = 0;
    for (int batch = 0; batch < kBatches; ++batch) {
      std::vector<uint64_t> all;
      for (int64_t t = 0; t < sizes_.tables; ++t) {
        const std::vector<uint64_t> ids = IdsOf(make, sizes_, t, batch);
        distinct += static_cast<double>(CountDistinct(ids)) / kBatches;
        for (const uint64_t id : ids) checksum += id;
        all.insert(all.end(), ids.begin(), ids.end());
      }
      batches.push_back(std::make_unique<DeviceArray<uint64_t>>(static_cast<int64_t>(all.size())));
      batches.back()->Set(all);
    }
    std::vector<double> lookups;
    std::vector<double> applies;
    std::vector<double> steps;
    for (int run = 0; run < kWarmUps + kTimed; ++run) {
      const DeviceArray<uint64_t>& ids = *batches[static_cast<size_t>(run % kBatches)];
      const double lookup = Seconds([&] { Lookup(ids); });
      const double apply = Seconds([&] { Apply(ids); });
      const double step = Seconds([&] {
        Lookup(ids);
        Apply(ids);
      });
      if (run < kWarmUps) continue;
      lookups.push_back(lookup);
      applies.push_back(apply);
      steps.push_back(step);
    }
    const double n = static_cast<double>(sizes_.tables * sizes_.batch);
    const double row = static_cast<double>(sizes_.dim) * sizeof(float);
    const double looked_up = n * (8 + row) + distinct * (64 + row);
    const double applied = n * (8 + row) + distinct * (64 + 2 * 3 * row + 2 * 8);
    Print(name, "lookup", Median(lookups), looked_up, distinct, checksum);
    Print(name, "apply", Median(applies), applied, distinct, checksum);
    Print(name, "step", Median(steps), looked_up + applied, distinct, checksum);
  }

 private:
  // Every id that there may be, in no order, so that the steps meet the rows of a table that has been
  // trained.
  void Fill() {
    std::vector<uint64_t> ids(static_cast<size_t>(sizes_.rows));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = i;
    for (size_t i = ids.size(); i-- > 1;) std::swap(ids[i], ids[Mix64(i) % (i + 1)]);
    DeviceArray<uint64_t> keys(sizes_.rows);
    keys.Set(ids);
    for (const auto& table : tables_) {
      for (int64_t begin = 0; begin < sizes_.rows; begin += sizes_.batch) {
        const int64_t n = std::min(sizes_.batch, sizes_.rows - begin);
        table->GatherOrInsert({keys.data() + begin, n, true}, rows_.data(), {1, 1}, nullptr, nullptr);
      }
    }
    WaitForDevice();
  }

  DeviceKeys Batch(const DeviceArray<uint64_t>& ids, size_t table) const {
    return {ids.data() + static_cast<int64_t>(table) * sizes_.batch, sizes_.batch, false};
  }
  float* Rows(size_t table) const {
    return rows_.data() + static_cast<int64_t>(table) * sizes_.batch * sizes_.dim;
  }

  void Lookup(const DeviceArray<uint64_t>& ids) {
    for (size_t t = 0; t < tables_.size(); ++t) {
      tables_[t]->GatherOrInsert(Batch(ids, t), Rows(t), {1, 1}, nullptr, nullptr);
    }
  }

  void Apply(const DeviceArray<uint64_t>& ids) {
    ++step_;
    beta_1_power_ *= 0.9;
    beta_2_power_ *= 0.999;
    const Update update = MakeUpdate(
        "adam", {{"learning_rate", 0.001}, {"beta_1_power", beta_1_power_}, {"beta_2_power", beta_2_power_}});
    for (size_t t = 0; t < tables_.size(); ++t) {
      tables_[t]->Apply(Batch(ids, t), Rows(t), update, {{1, 2}}, {1, step_}, nullptr);
    }
  }

  void Print(const char* ids, const char* stage, double seconds, double bytes, double distinct,
             uint64_t checksum) const {
    std::printf(
        "%s\n  {\"ids\": \"%s\", \"stage\": \"%s\", \"seconds\": %.4g, \"bytes\": %.4g, \"roofline\": %.4g, "
        "\"distinct\": %.2f, \"checksum\": \"%llu\"}",
        std::exchange(first_, false) ? "" : ",", ids, stage, seconds, bytes, bytes / seconds / bandwidth_,
        distinct, static_cast<unsigned long long>(checksum));
    std::fflush(stdout);
  }

  Sizes sizes_;
  double bandwidth_;
  DeviceArray<float> rows_;  // what the lookup gave, and then the gradients: (tables, batch, dim)
  std::vector<std::unique_ptr<DeviceTable>> tables_;
  uint32_t step_ = 1;
  double beta_1_power_ = 1;
  double beta_2_power_ = 1;
  inline static bool first_ = true;  // of what is printed
};

int Main(int argc, char** argv) {
  Sizes sizes;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    int64_t* const number = name == "--tables"  ? &sizes.tables
                            : name == "--dim"   ? &sizes.dim
                            : name == "--rows"  ? &sizes.rows
                            : name == "--batch" ? &sizes.batch
                                                : nullptr;
    if (number != nullptr) *number = i + 1 < argc ? std::atoll(argv[i + 1]) : 0;
    if (number == nullptr || *number <= 0) {
      std::fprintf(stderr,
                   "training_step_benchmark: %s; expected --tables, --dim, --rows or --batch, and a number\n",
                   argv[i]);
      return 2;
    }
  }
  const double bandwidth = CopyBandwidth();
  std::printf(
      "{\"device\": \"%s\", \"copy_bytes_per_second\": %.4g, \"tables\": %lld, \"dim\": %lld, \"rows\": "
      "%lld, "
      "\"batch\": %lld, \"optimizer\": \"adam\", \"results\": [",
      DeviceName().c_str(), bandwidth, static_cast<long long>(sizes.tables),
      static_cast<long long>(sizes.dim), static_cast<long long>(sizes.rows),
      static_cast<long long>(sizes.batch));
  {
    TrainingStep step(sizes, bandwidth);
    step.Run("uniform", UniformIds);
    step.Run("zipf", ZipfIds);
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
    std::fprintf(stderr, "training_step_benchmark: %s\n", error.what());
    return 1;
  }
}
