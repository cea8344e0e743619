// The head of a request as a client sends it again and again: the same bytes, but for a few values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvtable {

class HeadTemplate {
 public:
  // What stands at a place that may differ from request to request.
  enum class Kind : uint8_t {
    kKey,         // of one row, in the URL: an integer of at most 20 digits
    kLength,      // of the body
    kJsonLength,  // of the JSON that the body begins with
    kRequestId,   // see server/request_ids.py
    kText,        // any other value of a header, which nothing is made of
  };
  struct Hole {
    size_t begin, end;  // in the head
    Kind kind;
  };
  struct Values {
    size_t head_bytes = 0;
    std::string_view key;
    size_t length = 0;
    size_t json_length = std::string_view::npos;  // not said
    std::string_view request_id;
  };

  // `holes` rise, and do not touch each other. Throws Error(kInvalidArgument) where they do not.
  HeadTemplate(std::string head, std::vector<Hole> holes);

  // Whether `data` begins with such a head.
  bool Match(std::string_view data, Values* values) const;

 private:
  std::string head_;
  std::vector<Hole> holes_;
};

}  // namespace kvtable
