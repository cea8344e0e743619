#include "serving/head_template.h"

#include <utility>

#include "kvtable/types.h"

namespace kvtable {
namespace {

constexpr size_t kMostKeyDigits = 20, kMostLengthDigits = 9, kMostId = 128, kMostText = 1024;

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

bool IsOfId(char c) {
  return IsDigit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
         std::string_view("_.:/+=@-").find(c) != std::string_view::npos;
}

// As many of the first characters of `data` as `fits` says, at most `most`.
template <class Fits>
size_t Count(std::string_view data, size_t most, const Fits& fits) {
  size_t n = 0;
  while (n < data.size() && n <= most && fits(data[n])) ++n;
  return n;
}

// The number that `data` begins with. What is longer is no length of a body that is answered at once.
size_t ReadLength(std::string_view data, size_t* length) {
  const size_t digits = Count(data, kMostLengthDigits, IsDigit);
  if (digits > kMostLengthDigits) return 0;
  *length = 0;
  for (size_t i = 0; i < digits; ++i) *length = *length * 10 + static_cast<size_t>(data[i] - '0');
  return digits;
}

}  // namespace

HeadTemplate::HeadTemplate(std::string head, std::vector<Hole> holes)
    : head_(std::move(head)), holes_(std::move(holes)) {
  size_t last = 0;
  for (const Hole& hole : holes_) {
    if (hole.begin <= last || hole.end <= hole.begin || hole.end >= head_.size()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "holes of a head: expected them to rise, with text around each");
    }
    last = hole.end;
  }
}

bool HeadTemplate::Match(std::string_view data, Values* values) const {
  size_t at = 0, from = 0;
  for (const Hole& hole : holes_) {
    const size_t bytes = hole.begin - from;
    if (data.size() - at < bytes || data.compare(at, bytes, head_, from, bytes) != 0) return false;
    at += bytes;
    from = hole.end;
    const std::string_view rest = data.substr(at);
    size_t taken = 0;
    switch (hole.kind) {
      case Kind::kKey: {
        const size_t sign = !rest.empty() && rest[0] == '-';
        const size_t digits = Count(rest.substr(sign), kMostKeyDigits, IsDigit);
        if (digits == 0 || digits > kMostKeyDigits) return false;
        taken = sign + digits;
        values->key = rest.substr(0, taken);
        break;
      }
      case Kind::kLength:
        taken = ReadLength(rest, &values->length);
        break;
      case Kind::kJsonLength:
        taken = ReadLength(rest, &values->json_length);
        break;
      case Kind::kRequestId:
        taken = Count(rest, kMostId, IsOfId);
        if (taken > kMostId) return false;
        values->request_id = rest.substr(0, taken);
        break;
      case Kind::kText:
        taken = Count(rest, kMostText, [](char c) { return c > ' ' && c < 0x7f; });
        break;
    }
    if (taken == 0) return false;
    at += taken;
  }
  const size_t bytes = head_.size() - from;
  if (data.size() - at < bytes || data.compare(at, bytes, head_, from, bytes) != 0) return false;
  values->head_bytes = at + bytes;
  return true;
}

}  // namespace kvtable
