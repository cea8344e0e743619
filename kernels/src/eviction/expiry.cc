// Policies, and passes over tables.
#include "kvtable/expiry.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "eviction/row_ages.h"
#include "kvtable/table.h"

namespace kvtable {
namespace {

using Kind = EvictPolicy::Kind;

[[noreturn]] void ThrowInvalid(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

const char* NameOf(Kind kind) {
  switch (kind) {
    case Kind::kAfterSteps:
      return "an age in steps";
    case Kind::kAfterSeconds:
      return "an age in seconds";
    case Kind::kBelowNorm:
      return "a norm";
    case Kind::kBelowFrequency:
      return "a frequency";
    case Kind::kKeepTop:
      return "the rows that are kept";
  }
  return "";
}

void CheckPolicy(const EvictPolicy& policy) {
  if (policy.kind == Kind::kBelowNorm) {
    if (std::isfinite(policy.norm) && policy.norm > 0) return;
    ThrowInvalid("A policy by the norm " + std::to_string(policy.norm) +
                 ", below which rows go; expected a number above 0.");
  }
  if (policy.count < 1) {
    ThrowInvalid("A policy by " + std::string(NameOf(policy.kind)) + " of " + std::to_string(policy.count) +
                 "; expected 1 or more.");
  }
  if (policy.kind != Kind::kKeepTop && policy.count > int64_t{UINT32_MAX}) {
    ThrowInvalid("A policy by " + std::string(NameOf(policy.kind)) + " of " + std::to_string(policy.count) +
                 "; expected 4294967295 at most.");
  }
}

// What removes the rows of all these policies, none of which is kKeepTop, and those that have expired anyway.
RowTest TestOf(const Table& table, const std::vector<EvictPolicy>& policies) {
  RowTest test;
  const bool in_steps = table.expiry().ages() && table.expiry().unit == AgeUnit::kSteps;
  if (table.expiry().ages()) {
    test.written_before = RowAges::WrittenBefore(table.Now(), table.expiry().max_age);
  }
  for (const EvictPolicy& policy : policies) {
    const uint32_t count = static_cast<uint32_t>(policy.count);
    if (policy.kind == Kind::kBelowNorm) {
      test.least_norm = policy.norm;
    } else if (policy.kind == Kind::kBelowFrequency) {
      test.least_frequency = count;
    } else {
      if ((policy.kind == Kind::kAfterSteps) != in_steps) {
        throw Error(ErrorCode::kFailedPrecondition,
                    in_steps ? "The table counts the ages of rows in steps, not in seconds."
                             : "The table counts the ages of rows in seconds, not in steps. Make it with an "
                               "age in steps to have them stamped with steps.");
      }
      test.written_before = std::max(test.written_before, RowAges::WrittenBefore(table.Now(), count));
    }
  }
  return test;
}

RowTest TestOf(RankBy by, const RowRank& least_rank) {
  RowTest test;
  test.by = by;
  test.least_rank = least_rank;
  return test;
}

}  // namespace

void CheckPolicies(const std::vector<EvictPolicy>& policies) {
  for (size_t i = 0; i < policies.size(); ++i) {
    CheckPolicy(policies[i]);
    for (size_t j = 0; j < i; ++j) {
      if (policies[i].kind == policies[j].kind) {
        ThrowInvalid("Two policies by " + std::string(NameOf(policies[i].kind)) + ": keep one of them.");
      }
      const auto is_age = [](Kind kind) { return kind == Kind::kAfterSteps || kind == Kind::kAfterSeconds; };
      if (is_age(policies[i].kind) && is_age(policies[j].kind)) {
        ThrowInvalid(
            "Ages in steps and in seconds: a row has one stamp, of one unit. Keep one of the policies.");
      }
    }
  }
}

Expiry ExpiryOf(const std::vector<EvictPolicy>& policies) {
  Expiry expiry;
  for (const EvictPolicy& policy : policies) {
    if (policy.kind != Kind::kAfterSteps && policy.kind != Kind::kAfterSeconds) continue;
    expiry.unit = policy.kind == Kind::kAfterSteps ? AgeUnit::kSteps : AgeUnit::kSeconds;
    expiry.max_age = static_cast<uint32_t>(policy.count);
  }
  return expiry;
}

int64_t EvictBelow(Table* table, RankBy by, const RowRank& least_rank, ParallelFor& threads) {
  PassCursor cursor;
  return least_rank == RowRank() ? 0 : table->EvictSlice(TestOf(by, least_rank), &cursor, kAllRows, threads);
}

int64_t EvictExpired(Table* table, ParallelFor& threads) {
  PassCursor cursor;
  return table->expiry().ages() ? table->EvictSlice(TestOf(*table, {}), &cursor, kAllRows, threads) : 0;
}

int64_t Evict(Table* table, const EvictPolicy& policy, ParallelFor& threads) {
  CheckPolicy(policy);
  if (policy.kind != Kind::kKeepTop) {
    PassCursor cursor;
    return table->EvictSlice(TestOf(*table, {policy}), &cursor, kAllRows, threads);
  }
  // Rows that have expired are none of those that are kept.
  const int64_t evicted = EvictExpired(table, threads);
  if (table->Size() <= policy.count) return evicted;
  RankSearch search(policy.by, policy.count);
  while (search.next() != nullptr) {
    PassCursor counting;
    std::vector<int64_t> counts(RankDigit::kValues);
    table->CountRanks(*search.next(), &counting, kAllRows, counts.data(), threads);
    search.Take(counts);
  }
  return evicted + EvictBelow(table, policy.by, search.least_rank(), threads);
}

void RankSearch::Take(const std::vector<int64_t>& counts) {
  int value = RankDigit::kValues - 1;
  while (value >= 0 && counts[static_cast<size_t>(value)] <= left_) {
    left_ -= counts[static_cast<size_t>(value--)];
  }
  if (value < 0) {  // all are kept that have the digits found
    done_ = true;
    return;
  }
  done_ = left_ == 0 || digit_.digit + 1 == RankDigit::kDigits;
  const uint64_t found = static_cast<uint64_t>(left_ == 0 ? value + 1 : value);
  constexpr int kDigitsOfWord = RankDigit::kDigits / 2;
  uint64_t* const word = digit_.digit < kDigitsOfWord ? &digit_.found.measure : &digit_.found.key;
  *word |= found << (48 - digit_.digit % kDigitsOfWord * 16);
  ++digit_.digit;
}

Sweep::Sweep(std::vector<EvictPolicy> policies) {
  CheckPolicies(policies);
  for (const EvictPolicy& policy : policies) {
    if (policy.kind == Kind::kKeepTop) {
      top_ = policy;
    } else {
      tests_.push_back(policy);
    }
  }
}

int64_t Sweep::Run(Table* table, int64_t most_rows, ParallelFor& threads) {
  if (cursor_.ended) BeginNext(table);
  if (cursor_.ended) return 0;
  switch (pass_) {
    case Pass::kTests:
      return table->EvictSlice(TestOf(*table, tests_), &cursor_, most_rows, threads);
    case Pass::kRemoves:
      return table->EvictSlice(TestOf(top_->by, search_.least_rank()), &cursor_, most_rows, threads);
    case Pass::kCounts:
      table->CountRanks(*search_.next(), &cursor_, most_rows, counts_.data(), threads);
  }
  if (cursor_.ended) search_.Take(counts_);
  return 0;
}

// To the pass after the one that has ended; it has ended, too, where there is nothing to do in it.
void Sweep::BeginNext(Table* table) {
  if (pass_ == Pass::kRemoves && !tests_.empty()) {
    pass_ = Pass::kTests;
  } else if (pass_ == Pass::kCounts && search_.next() == nullptr) {
    pass_ = Pass::kRemoves;
    if (search_.least_rank() == RowRank()) return;
  } else if (pass_ != Pass::kCounts) {
    if (!top_) {
      pass_ = Pass::kRemoves;
      return;
    }
    if (table->Size() <= top_->count) {
      pass_ = Pass::kRemoves;
      return;
    }
    pass_ = Pass::kCounts;
    search_ = RankSearch(top_->by, top_->count);
  }
  if (pass_ == Pass::kCounts) counts_.assign(RankDigit::kValues, 0);
  cursor_ = {};
}

}  // namespace kvtable
