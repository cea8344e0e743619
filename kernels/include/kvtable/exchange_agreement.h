// Whether all ranks look up the same: the same tables in the same order, and in the same way.
//
// Each rank has a text of what it looks up: a line for the whole, and one for each table. Its hash goes with
// every message. The text goes with it, too, until all ranks know it, so that an error can say what differs,
// and not only that something does.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvtable {

// Of a text.
uint64_t HashOfLookup(const std::string& text);

// Whether a message with this text has come to this process, and so to all ranks: each sends to all. Safe to
// call from several threads, as is what follows.
bool IsKnownLookup(uint64_t hash);

// Takes note of a text that came.
void RememberLookup(uint64_t hash, const std::string& text);

// The first difference between what rank 0 and another rank look up, by their hashes, for an error; empty
// where all are the same.
std::string DifferenceOfLookups(const std::vector<uint64_t>& of_ranks);

}  // namespace kvtable
