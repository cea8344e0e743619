// Rows that go because of what they are: their age, their norm, how often they were updated, or because others
// are worth more.
//
// An age is a hard bound. In a table that was made with one (TableOptions::expiry), no operation sees a row
// past it, whether the row's memory has been collected or not: lookups take it for missing, and a write makes
// it anew, slots and stamps as those of any new row. What removes such rows for good, and rows by every other
// policy, is Evict, for the whole table, or a Sweep, some rows at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kvtable/eviction.h"
#include "kvtable/parallel_for.h"
#include "kvtable/types.h"

namespace kvtable {

class Table;

// What the version of a row counts, and so its age.
enum class AgeUnit : uint8_t { kSeconds, kSteps };

// The age at which rows go, for the life of a table. With one, the table stamps versions itself, whatever
// versions its callers give:
//   - kSeconds: with the second of the write. The clock is the system's time when the table was made plus what
//     has passed since, so that nobody who sets the system's clock makes rows older or younger; of a clock that
//     was given, what it goes forward counts, and what it goes back does not.
//   - kSteps: with the step of the table. Apply, and a write that ends a step, stamps rows with the next step
//     and then advances the table to it; rows that it finds are there by the step before, as they were for the
//     lookups of that step.
// The age of a row is what the clock has gone on since the row was last written (a lookup writes nothing, but
// where it inserts). A row is there while its age is below `max_age`. Ages in seconds are differences of whole
// seconds: a row may go up to a second early, and never late.
struct Expiry {
  AgeUnit unit = AgeUnit::kSeconds;
  uint32_t max_age = 0;  // 0: rows do not age
  EvictionClock clock;   // microseconds since 1970; none: the system's

  bool ages() const { return max_age > 0; }
};

// What rows are ranked by. Of rows of one frequency, those last written longer ago come first; of one version,
// those of lower frequency; of whatever is equal in that, those with the lower key, as an unsigned number. So
// no two rows are equal. A norm that is no number ranks above all others.
enum class RankBy : uint8_t { kFrequency, kVersion, kNorm };

// A row's place among all: the lower goes first.
struct RowRank {
  uint64_t measure = 0;
  uint64_t key = 0;

  friend bool operator<(const RowRank& a, const RowRank& b) {
    return a.measure != b.measure ? a.measure < b.measure : a.key < b.key;
  }
  friend bool operator==(const RowRank& a, const RowRank& b) {
    return a.measure == b.measure && a.key == b.key;
  }
};

// Which rows a pass removes: those of which at least one of these is true. Nothing is at first.
struct RowTest {
  uint32_t written_before = 0;   // the version is below this
  uint32_t least_frequency = 0;  // the frequency is below this
  double least_norm = 0;         // the L2 norm of the value is below this; never that of a row with a NaN
  RankBy by = RankBy::kNorm;     // and the rank is below this
  RowRank least_rank;

  bool ranks() const { return !(least_rank == RowRank()); }
  bool reads_values() const { return least_norm > 0 || (ranks() && by == RankBy::kNorm); }
};

// A digit of ranks: which rows are counted, and by what. A rank is eight digits of 16 bits, the highest first;
// `found` has those before this one, and zeros behind.
struct RankDigit {
  static constexpr int kDigits = 8;
  static constexpr int kValues = 1 << 16;

  RankBy by = RankBy::kFrequency;
  int digit = 0;
  RowRank found;
};

// How far a pass has come. What it means is the table's own affair.
struct PassCursor {
  uint64_t next = 0;
  bool ended = false;
};

inline constexpr int64_t kAllRows = INT64_MAX;  // of a pass that is not cut in slices

struct EvictPolicy {
  enum class Kind : uint8_t { kAfterSteps, kAfterSeconds, kBelowNorm, kBelowFrequency, kKeepTop };

  Kind kind = Kind::kAfterSeconds;
  int64_t count = 0;  // of steps, seconds, updates, or rows that are kept
  double norm = 0;
  RankBy by = RankBy::kFrequency;  // of kKeepTop
};

// Throws Error(kInvalidArgument) for a policy that cannot be, and for policies that contradict one another: two
// of one kind, or ages in both units.
void CheckPolicies(const std::vector<EvictPolicy>& policies);

// The age that policies give to a table for its life; one that does not age where they name none.
Expiry ExpiryOf(const std::vector<EvictPolicy>& policies);

// Removes the rows that a policy names, and those that have expired anyway, and returns how many. Other operations may go on meanwhile; where they
// change rows, it goes by each row as it is when its turn comes, and kKeepTop keeps about as many as it says.
// Throws Error(kFailedPrecondition) where the versions of the table are of the other unit.
int64_t Evict(Table* table, const EvictPolicy& policy, ParallelFor& threads);

// The last pass of kKeepTop: removes the rows below a rank.
int64_t EvictBelow(Table* table, RankBy by, const RowRank& least_rank, ParallelFor& threads);

// Removes the rows that have expired, in a table whose rows age.
int64_t EvictExpired(Table* table, ParallelFor& threads);

// Finds the rank of the lowest row that is kept where `keep` rows are, from the counts of one digit after the
// other. So the rows may be those of several tables: their counts are added.
class RankSearch {
 public:
  RankSearch(RankBy by, int64_t keep) : left_(keep) { digit_.by = by; }

  // A search that has come so far: `digits` are found, and `left` rows to be kept have them; at the end 0.
  RankSearch(RankBy by, int digits, const RowRank& found, int64_t left)
      : digit_{by, digits, found}, left_(left), done_(left == 0 || digits == RankDigit::kDigits) {}

  // What is to be counted next, in no more than RankDigit::kDigits passes; null at the end.
  const RankDigit* next() const { return done_ ? nullptr : &digit_; }
  void Take(const std::vector<int64_t>& counts);
  // Rows to be kept among those with the digits found; 0 at the end.
  int64_t left() const { return done_ ? 0 : left_; }
  int digits() const { return digit_.digit; }
  // At the end: rows below it go. {0, 0} where none do.
  RowRank least_rank() const { return digit_.found; }

 private:
  RankDigit digit_;
  int64_t left_;  // rows to be kept among those with the digits found
  bool done_ = false;
};

// Policies, over and over again, a slice of the table at a time: what goes on beside training.
class Sweep {
 public:
  explicit Sweep(std::vector<EvictPolicy> policies);

  // Looks at about `most_rows` rows, and returns how many went (of a table in device memory whose arrays are
  // there: 0). kKeepTop takes some passes that only count before one that removes.
  int64_t Run(Table* table, int64_t most_rows, ParallelFor& threads);

 private:
  // Passes, one after the other: of all tests; those that count ranks; the one that removes by rank.
  enum class Pass : uint8_t { kTests, kCounts, kRemoves };

  void BeginNext(Table* table);

  std::vector<EvictPolicy> tests_;
  std::optional<EvictPolicy> top_;
  Pass pass_ = Pass::kRemoves;
  RankSearch search_{RankBy::kFrequency, 1};
  std::vector<int64_t> counts_;
  PassCursor cursor_{0, true};
};

}  // namespace kvtable
