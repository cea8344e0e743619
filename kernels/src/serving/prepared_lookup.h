// Lookups by HTTP whose head is known, from the bytes of the requests to those of the responses.
//
// A client sends the same head with each request, but for a few values in it (head_template.h), so what a head says is
// read once, by server/http_protocol.py, which also decides who may ask. What is left for each request is done here:
// compare the head, look the body's keys up, write a response, and count it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvtable/snapshot.h"
#include "serving/head_template.h"
#include "serving/lookup_counts.h"
#include "serving/table_answer.h"

namespace kvtable {

// By one thread at a time.
class PreparedLookup {
 public:
  enum class What : uint8_t {
    kLookup,   // of one table: a body as table_answer.h has it, or a key in the URL
    kFrame,    // of several, as a frame
    kPredict,  // TensorFlow Serving's REST
    kInfer,    // the Open Inference Protocol's
  };
  // What may be asked for by a name: of kLookup there is one, whose name does not matter.
  struct Table {
    std::string name;
    const SnapshotTable* table = nullptr;
    Tally* tally = nullptr;
    RecentKeys* recent = nullptr;  // or null
  };
  struct Plan {
    What what = What::kLookup;
    HeadTemplate head;
    std::vector<Table> tables;
    AnswerForm form;      // of kLookup; the others take `missing`, `max_keys` and `max_numbers` of it
    int64_t version = 0;  // the number of the version that the tables are of
    RequestIds* ids = nullptr;
    Tally* several = nullptr;  // of kFrame: counts requests for several tables, but not their keys
    std::string about;         // of kInfer: what its JSON begins with
  };

  explicit PreparedLookup(Plan plan);

  // Answers the requests of this head that follow each other in `data` from `at` on, as far as they are whole: appends
  // the responses to `*out`, each with the lines `defaults` (each ended by "\r\n") after its status line. Stops at what
  // server/answer.py must answer (an error, or anything unusual), and after 64 KiB of responses, so that whoever sends
  // them can see whether they are read. Returns where it stopped; `*answers` gets how many requests that were.
  size_t Answer(std::string_view data, size_t at, std::string_view defaults, std::string* out,
                int64_t* answers);

 private:
  // What an answer has beside its body.
  struct Made {
    std::string_view body;
    const char* media_type = nullptr;
  };

  // Makes the answer to one request; false where Python must. Puts header lines into fields_, and what is to be counted
  // into counted_.
  bool Make(const HeadTemplate::Values& head, std::string_view body, Made* made);
  bool MakeLookup(const HeadTemplate::Values& head, std::string_view body, Made* made);
  bool MakeFrame(std::string_view body, Made* made);
  bool MakePredict(std::string_view body, Made* made);
  bool MakeInfer(const HeadTemplate::Values& head, std::string_view body, Made* made);
  // Looks ids up into rows_, as float32, and found_; false as above.
  bool LookUp(const Table& table, const std::vector<int64_t>& ids);
  const Table* Find(std::string_view name) const;

  struct Counted {
    const Table* table;
    int64_t keys, missing;
  };

  Plan plan_;
  // Of the request in hand:
  std::string rows_, text_, fields_;
  std::vector<uint8_t> found_;
  std::vector<Counted> counted_;
};

}  // namespace kvtable
