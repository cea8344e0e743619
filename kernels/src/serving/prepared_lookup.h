// Lookups by HTTP whose head is known, from the bytes of the requests to those of the responses.
//
// A client sends the same head with each request, so what a head says is read once, by server/http_protocol.py, which
// also decides who may ask. What is left for each request is done here: compare the head, look the body's keys up, write
// a response, and count it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "kvtable/snapshot.h"
#include "serving/lookup_counts.h"
#include "serving/table_answer.h"

namespace kvtable {

// By one thread at a time.
class PreparedLookup {
 public:
  struct Plan {
    const SnapshotTable* table = nullptr;
    std::string head;  // of the request, with the empty line that ends it
    // Where in it the key is, which may be another with each request, if it asks for one row by its URL; else equal.
    size_t key_begin = 0;
    size_t key_end = 0;
    size_t body_bytes = 0;
    AnswerForm form;
    int64_t version = 0;  // the number of the version that the table is of
    RequestIds* ids = nullptr;
    Tally* tally = nullptr;
  };

  explicit PreparedLookup(Plan plan) : plan_(std::move(plan)) {}

  // Answers the requests of this head that follow each other in `data` from `at` on, as far as they are whole: appends
  // the responses to `*out`, each with the lines `defaults` (each ended by "\r\n") after its status line. Stops at what
  // server/answer.py must answer (an error, or anything unusual), and after 64 KiB of responses, so that whoever sends
  // them can see whether they are read. Returns where it stopped; `*answers` gets how many requests that were.
  size_t Answer(std::string_view data, size_t at, std::string_view defaults, std::string* out,
                int64_t* answers);

 private:
  // Whether a request of this head begins at `data`; `*bytes` gets the length of the head, `*key` its key.
  bool Match(std::string_view data, size_t* bytes, int64_t* key) const;

  Plan plan_;
  std::string rows_;  // of the request in hand
};

}  // namespace kvtable
