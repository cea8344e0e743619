#include "saved_counts.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "kvtable/part_of.h"
#include "tensorflow/core/platform/logging.h"

namespace kvtools {

namespace tf = tensorflow;

namespace {

template <class Key>
void Narrow(const std::vector<uint64_t>& wide, tf::Tensor* keys) {
  Key* const to = static_cast<Key*>(keys->data());
  for (size_t i = 0; i < wide.size(); ++i) to[i] = static_cast<Key>(wide[i]);
}

// Of a part's waiting keys those that are ours and have no row, with their counts, each as the table has keys.
template <class Key>
void KeepOwn(const tf::Tensor& keys, const tf::Tensor& counts, int64_t own_part, int64_t own_parts,
             const kvtable::Table& table, kvtable::ParallelFor* threads, std::vector<uint64_t>* own,
             std::vector<uint32_t>* own_counts) {
  const int64_t n = keys.NumElements();
  const Key* const from = static_cast<const Key*>(keys.data());
  const std::unique_ptr<bool[]> there = std::make_unique<bool[]>(static_cast<size_t>(n));
  table.Contains(from, n, there.get(), *threads);
  const kvtable::PartOf<Key> part_of(own_parts);
  for (int64_t i = 0; i < n; ++i) {
    if (there[static_cast<size_t>(i)] || part_of(from[i]) != own_part) continue;
    // Narrow keys are widened as signed numbers.
    own->push_back(static_cast<uint64_t>(static_cast<int64_t>(from[i])));
    own_counts->push_back(static_cast<const uint32_t*>(counts.data())[i]);
  }
}

void WarnOfLoss(const TableConfig& config, const std::string& where, const std::string& tensor,
                const std::string& why) {
  LOG(WARNING) << "Checkpoint '" << where << "': key-value variable '" << config.name
               << "' takes nothing of '" << tensor << "': " << why
               << ". Keys that had been counted begin anew.";
}

absl::Status ReadTensor(const std::string& where, const std::string& name, tf::DataType dtype, int64_t n,
                        tf::BundleReader* reader, tf::Tensor* tensor) {
  *tensor = tf::Tensor(dtype, tf::TensorShape({n}));
  if (n > 0 && tensor->data() == nullptr) return errors::ResourceExhausted("no memory for '", name, "'");
  return ReadError(where, name, reader->Lookup(name, tensor));
}

}  // namespace

void AddCounts(const TableConfig& config, const kvtable::Table& table,
               std::vector<std::pair<std::string, tf::Tensor>>* more) {
  const std::shared_ptr<kvtable::Admitter>& admitter = table.admitter();
  if (admitter == nullptr) return;
  if (admitter->policy().kind == kvtable::AdmissionPolicy::Kind::kBloom) {
    const std::vector<char> cells = admitter->Filter();
    tf::Tensor filter(tf::DT_UINT8, tf::TensorShape({static_cast<int64_t>(cells.size())}));
    std::memcpy(filter.data(), cells.data(), cells.size());
    more->emplace_back("-pending_filter", std::move(filter));
    return;
  }
  std::vector<uint64_t> wide;
  std::vector<uint32_t> waiting;
  admitter->Waiting(&wide, &waiting);
  const tf::TensorShape shape({static_cast<int64_t>(wide.size())});
  tf::Tensor keys(config.key_dtype, shape), counts(tf::DT_UINT32, shape);
  if (config.key_dtype == tf::DT_INT32) {
    Narrow<int32_t>(wide, &keys);
  } else {
    Narrow<uint64_t>(wide, &keys);
  }
  std::copy(waiting.begin(), waiting.end(), static_cast<uint32_t*>(counts.data()));
  more->emplace_back("-pending_keys", std::move(keys));
  more->emplace_back("-pending_counts", std::move(counts));
}

absl::Status ReadCounts(const TableConfig& config, const std::string& where, const SavedPart& part,
                        int64_t own_part, int64_t own_parts, tf::BundleReader* reader, kvtable::Table* table,
                        kvtable::ParallelFor* threads) {
  kvtable::Admitter* const admitter = table->admitter().get();
  const std::string counted = part.prefix + "-pending_keys", filtered = part.prefix + "-pending_filter";
  if (part.waiting_keys > 0 && admitter == nullptr) {
    WarnOfLoss(config, where, counted, "it has no admission that counts");
  } else if (part.waiting_keys > 0) {
    tf::Tensor keys, counts;
    TF_RETURN_IF_ERROR(ReadTensor(where, counted, config.key_dtype, part.waiting_keys, reader, &keys));
    TF_RETURN_IF_ERROR(ReadTensor(where, part.prefix + "-pending_counts", tf::DT_UINT32, part.waiting_keys,
                                  reader, &counts));
    std::vector<uint64_t> own;
    std::vector<uint32_t> own_counts;
    if (config.key_dtype == tf::DT_INT32) {
      KeepOwn<int32_t>(keys, counts, own_part, own_parts, *table, threads, &own, &own_counts);
    } else if (config.key_dtype == tf::DT_UINT64) {
      KeepOwn<uint64_t>(keys, counts, own_part, own_parts, *table, threads, &own, &own_counts);
    } else {
      KeepOwn<int64_t>(keys, counts, own_part, own_parts, *table, threads, &own, &own_counts);
    }
    admitter->Increase(own.data(), static_cast<int64_t>(own.size()), own_counts.data());
  }
  if (part.filter_bytes == 0) return absl::OkStatus();
  const kvtable::AdmissionPolicy& admission = config.policies.admission;
  if (admission.kind != kvtable::AdmissionPolicy::Kind::kBloom || admitter == nullptr) {
    WarnOfLoss(config, where, filtered, "it does not count in a filter, and a filter does not know its keys");
    return absl::OkStatus();
  }
  if (part.admission.cells() != admission.cells() || part.admission.hashes() != admission.hashes()) {
    WarnOfLoss(config, where, filtered,
               "its own filter is of another capacity or error, and a filter does not know its keys");
    return absl::OkStatus();
  }
  if (part.filter_bytes != admission.cells() && part.filter_bytes != 2 * admission.cells()) {
    return Damaged(where, filtered, "has ", part.filter_bytes, " bytes for ", admission.cells(), " cells");
  }
  tf::Tensor cells;
  TF_RETURN_IF_ERROR(ReadTensor(where, filtered, tf::DT_UINT8, part.filter_bytes, reader, &cells));
  admitter->MergeFilter(static_cast<const char*>(cells.data()), part.filter_bytes);
  return absl::OkStatus();
}

}  // namespace kvtools
