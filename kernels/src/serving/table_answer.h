// A lookup of one table of a snapshot, from the bytes of the request to those of its answer.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "kvtable/snapshot.h"
#include "serving/lookup_counts.h"

namespace kvtable {

enum class MissingKeys : uint8_t { kZeros, kDefault, kError };

struct AnswerForm {
  bool binary_keys = false;                   // int64 keys, else JSON (json_lookup.h)
  bool binary_rows = false;                   // float32 rows, else JSON (json_rows.h)
  MissingKeys missing = MissingKeys::kZeros;  // where the request does not say it
  int64_t max_keys = 0;
  int64_t max_numbers = 0;       // max(keys, bags) x dim
  bool one_row = false;          // of one binary key: JSON is {"key":17,"embedding":[...]}
  RecentKeys* recent = nullptr;  // gets keys of some of the lookups that were answered, if it is not null
};

struct TableAnswer {
  int64_t keys = 0;
  int64_t missing = 0;
  int64_t rows = 0;  // keys, or bags
  std::string json;  // where rows are not binary
};

// Answers `body`, and returns true; or returns false, where server/answer.py must do it: what is wrong, what is
// too much, what is asked for in an unusual way, and missing keys where these are an error.
//
// Binary rows go to what `allocate(bytes)` gives, which is called at most once. It is called as soon as the
// number of rows is known: what follows may then be done without locks of the caller's, such as the GIL, which
// `unlocked(numbers, body)` is for: it calls body().
bool AnswerLookup(const SnapshotTable& table, std::string_view body, const AnswerForm& form,
                  const std::function<void*(int64_t bytes)>& allocate,
                  const std::function<void(int64_t numbers, const std::function<void()>& work)>& unlocked,
                  TableAnswer* answer);

// ---- Several tables, in the frames of kvtools/lookup_frame.py

struct FramePart {
  std::string_view table;
  uint32_t combiner = 0;  // 0: none
  int64_t keys = 0;
  int64_t bags = 0;
  const char* keys_at = nullptr;     // int64 (keys)
  const char* splits_at = nullptr;   // int64 (bags + 1) with a combiner
  const char* weights_at = nullptr;  // float (keys), or null: all are 1
};

// Reads a request as far as it can without knowing the tables. Returns false where lookup_frame.py must say what
// is wrong.
bool ReadFrame(std::string_view body, std::vector<FramePart>* parts, uint32_t* missing);

struct FrameLimits {
  MissingKeys missing = MissingKeys::kZeros;
  int64_t max_keys = 0;
  int64_t max_numbers = 0;
  uint64_t version = 0;
};

// As AnswerLookup; `tables` has the table of each part, and `missing` gets how many of its keys are.
bool AnswerFrame(const std::vector<const SnapshotTable*>& tables, const std::vector<FramePart>& parts,
                 uint32_t said, const FrameLimits& limits,
                 const std::function<void*(int64_t bytes)>& allocate,
                 const std::function<void(int64_t numbers, const std::function<void()>& work)>& unlocked,
                 std::vector<int64_t>* missing);

}  // namespace kvtable
