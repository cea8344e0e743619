// The codecs of the lookup server on what strangers may send: cut off, changed, and of every length.
//
//   serving_test [STRIDE]   looks at every STRIDE-th float32, 4,099 unless given; 1: at all of them, in some minutes
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "serving/head_template.h"
#include "serving/inference_request.h"
#include "serving/json_lookup.h"
#include "serving/json_rows.h"
#include "serving/shortest_float.h"
#include "serving/table_answer.h"

namespace kvtable {
namespace {

// In memory of exactly its size, so that AddressSanitizer sees a byte that is read too much.
class Exact {
 public:
  explicit Exact(const std::string& text) : size_(text.size()), bytes_(new char[text.size()]) {
    std::memcpy(bytes_.get(), text.data(), size_);
  }
  std::string_view view() const { return {bytes_.get(), size_}; }

 private:
  size_t size_;
  std::unique_ptr<char[]> bytes_;
};

bool Reads(const std::string& text, KeyType key_type = KeyType::kInt64, JsonLookup* lookup = nullptr) {
  const Exact body(text);
  JsonLookup own;
  return ReadJsonLookup(body.view(), key_type, 4, lookup != nullptr ? lookup : &own);
}

const char* const kBodies[] = {
    "{\"keys\": [1, -20, 0], \"missing\": \"error\"}",
    " {\"keys\":[[1,-0],[],[9]],\"combiner\":\"mean\",\"weights\":[[1.5e1,-0.5],[],[3]]}\n",
    "{\"keys\": [10, 20], \"row_splits\": [0, 1, 1, 2], \"combiner\": \"sqrtn\", \"weights\": [1e-3, 2]}",
};

void WholeBodiesAreReadAndCutOnesAreNot() {
  for (const std::string body : kBodies) {
    CHECK(Reads(body));
    const size_t last = body.rfind('}');
    for (size_t end = 0; end <= last; ++end) CHECK(!Reads(body.substr(0, end)));
  }
  JsonLookup lookup;
  const Exact body(kBodies[1]);
  CHECK(ReadJsonLookup(body.view(), KeyType::kInt32, 4, &lookup));
  CHECK(lookup.keys == (std::vector<int64_t>{1, 0, 9}) &&
        lookup.splits == (std::vector<int64_t>{0, 2, 2, 3}));
  CHECK(lookup.weights == (std::vector<float>{15.0f, -0.5f, 3.0f}) && lookup.combiner == "mean");
}

void OnlyIntegersInRangeAreKeys() {
  CHECK(Reads("{\"keys\":[9223372036854775807,-9223372036854775808]}"));
  CHECK(!Reads("{\"keys\":[9223372036854775808]}"));
  CHECK(Reads("{\"keys\":[18446744073709551615]}", KeyType::kUint64));
  CHECK(!Reads("{\"keys\":[-1]}", KeyType::kUint64));
  CHECK(!Reads("{\"keys\":[2147483648]}", KeyType::kInt32));
  for (const char* key :
       {"01", "-", "+1", "1.0", "1e1", "-01", "0x1", "", " ", "1 2", "\"1\"", "null", "NaN", "1_0"}) {
    CHECK(!Reads("{\"keys\":[" + std::string(key) + (*key == 0 || *key == ' ' ? ",1" : "") + "]}"));
  }
  CHECK(!Reads("{\"keys\":[1,2,3,4,5]}"));  // one more than there may be
}

void ChangedBodiesAreReadWithinTheirBytes() {
  std::mt19937 random(1);
  const std::string alphabet("{}[],:\"0123456789.-+eE \n\0nulkeys\\\xff", 34);
  for (int round = 0; round < 200'000; ++round) {
    std::string body = kBodies[random() % 3];
    for (uint32_t change = random() % 4; change > 0; --change) {
      const size_t at = random() % body.size();
      const char with = alphabet[random() % alphabet.size()];
      if (random() % 2 == 0) {
        body[at] = with;
      } else {
        body.insert(at, 1, with);
      }
    }
    JsonLookup lookup;
    if (!Reads(body, static_cast<KeyType>(random() % 3), &lookup)) continue;
    CHECK(lookup.keys.size() <= 4 && (!lookup.weighted || lookup.weights.size() == lookup.keys.size()));
    CHECK(!lookup.pooled || SplitsRise(lookup.splits, lookup.keys.size()));
  }
}

std::string Frame() {
  std::string frame("KVQ1\1\0\0\0\2\0\0\0\0\0\0\0", 16);
  frame += std::string("\3\0\0\0\2\0\0\0\1\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0", 32);
  frame += std::string("ads\0\0\0\0\0", 8) + std::string(2 * 8, '\7') + std::string(2 * 8, '\0') +
           std::string(8, '\0');
  return frame;
}

void FramesAreReadWithinTheirBytes() {
  const std::string whole = Frame();
  uint32_t missing;
  for (size_t end = 0; end <= whole.size(); ++end) {
    const Exact body(whole.substr(0, end));
    std::vector<FramePart> parts;
    CHECK(ReadFrame(body.view(), &parts, &missing) == (end == whole.size()));
  }
  std::mt19937 random(2);
  for (int round = 0; round < 200'000; ++round) {
    std::string changed = whole;
    for (int change = 0; change < 3; ++change)
      changed[random() % changed.size()] = static_cast<char>(random());
    const Exact body(changed);
    std::vector<FramePart> parts;
    if (!ReadFrame(body.view(), &parts, &missing)) continue;
    for (const FramePart& part : parts) {
      const char* const end = body.view().data() + changed.size();
      CHECK(part.keys_at + part.keys * 8 <= end && part.table.data() + part.table.size() <= end);
      CHECK(part.splits_at == nullptr || part.splits_at + (part.bags + 1) * 8 <= end);
    }
  }
}

// What a template takes begins with its head, and says where the values are; nothing is read behind the data.
void HeadsAreMatchedWithinTheirBytes() {
  using Kind = HeadTemplate::Kind;
  const std::string head = "POST /x HTTP/1.1\r\nlength: 12\r\nid: job-1\r\ntrace: 00-ab\r\n\r\n";
  const auto place = [&](const std::string& value) { return head.find(": " + value) + 2; };
  const auto hole = [&](const std::string& value, Kind kind) {
    return HeadTemplate::Hole{place(value), place(value) + value.size(), kind};
  };
  const HeadTemplate known(
      head, {hole("12", Kind::kLength), hole("job-1", Kind::kRequestId), hole("00-ab", Kind::kText)});
  const auto with = [&](const std::string& length, const std::string& id, const std::string& trace) {
    std::string other = head;
    other.replace(place("00-ab"), 5, trace).replace(place("job-1"), 5, id).replace(place("12"), 2, length);
    return other;
  };
  for (const auto& [length, id, trace, taken] :
       {std::tuple{"12", "job-1", "00-ab", true}, std::tuple{"0", "x", "y", true},
        std::tuple{"999999999", "a.b:c/d+e=f@g-_", "z", true}, std::tuple{"9999999999", "x", "y", false},
        std::tuple{"", "x", "y", false}, std::tuple{"1a", "x", "y", false},
        std::tuple{"1", "two words", "y", false}, std::tuple{"1", "x", "two words", false},
        std::tuple{"-1", "x", "y", false}}) {
    const std::string text = with(length, id, trace);
    for (size_t end = 0; end <= text.size(); ++end) {
      const Exact data(text.substr(0, end));
      HeadTemplate::Values values;
      CHECK(known.Match(data.view(), &values) == (taken && end == text.size()));
      if (!taken || end < text.size()) continue;
      CHECK(values.head_bytes == end && values.length == std::stoull(length) && values.request_id == id);
      CHECK(known.Match(Exact(text + "body").view(), &values));
    }
  }
  HeadTemplate::Values values;
  CHECK(known.Match(with("1", std::string(128, 'a'), "y"), &values));
  CHECK(!known.Match(with("1", std::string(129, 'a'), "y"), &values));
}

const char* const kPredicts[] = {
    "{\"instances\": [1, -2]}", "{\"signature_name\":\"a\",\"instances\":[{\"ids\":1},{\"ids\":-2}]}",
    " {\"inputs\":[1,-2],\"signature_name\":\"a\"} ", "{\"inputs\":{\"ids\":[1,-2]}}"};
const char* const kInfers[] = {
    "{\"inputs\":[{\"name\":\"ids\",\"shape\":[2,1],\"datatype\":\"INT64\",\"data\":[1,-2]}]}",
    "{\"id\":\"7\",\"inputs\":[{\"name\":\"ids\",\"shape\":[2],\"datatype\":\"INT64\",\"data\":[1,-2]}],"
    "\"outputs\":[{\"name\":\"found\"},{\"name\":\"embeddings\",\"parameters\":{\"binary_data\":true}}],"
    "\"parameters\":{\"binary_data_output\":false,\"signature_name\":\"a\"}}"};

void InferencesAreReadWithinTheirBytes() {
  const std::vector<int64_t> expected = {1, -2};
  const auto predicts = [](const std::string& text, PredictRequest* request) {
    return ReadPredict(Exact(text).view(), 4, request);
  };
  const auto infers = [](const std::string& text, InferRequest* request) {
    const Exact body(text);
    return ReadInfer(body.view(), text.size(), 4, request);
  };
  std::mt19937 random(3);
  const auto changed = [&](std::string text) {
    for (int change = 0; change < 3; ++change) text[random() % text.size()] = static_cast<char>(random());
    return text;
  };
  for (const std::string text : kPredicts) {
    PredictRequest whole;
    CHECK(predicts(text, &whole) && whole.ids == expected);
    for (size_t end = 0; end <= text.rfind('}'); ++end) {
      PredictRequest part;
      CHECK(!predicts(text.substr(0, end), &part));
    }
    for (int round = 0; round < 20'000; ++round) {
      PredictRequest other;
      if (predicts(changed(text), &other)) CHECK(!other.ids.empty() && other.ids.size() <= 4);
    }
  }
  for (const std::string text : kInfers) {
    InferRequest whole;
    CHECK(infers(text, &whole) && whole.ids == expected);
    for (size_t end = 0; end <= text.rfind('}'); ++end) {
      InferRequest part;
      CHECK(!infers(text.substr(0, end), &part));
    }
    for (int round = 0; round < 20'000; ++round) {
      InferRequest other;
      if (infers(changed(text), &other)) CHECK(!other.ids.empty() && other.ids.size() <= 4);
    }
  }
}

// Read as a float or as a double that is rounded to one, text gives back the number.
void FloatsKeepTheirBits(uint64_t stride) {
  std::string text;
  for (uint64_t bits = 0; bits < 0x7f800000; bits += stride) {
    const uint32_t narrow = static_cast<uint32_t>(bits);
    float number;
    std::memcpy(&number, &narrow, sizeof(number));
    text.clear();
    AppendJsonRows(&number, 1, 1, &text);
    const char* const end = text.data() + text.size() - 1;
    double wide = 0;
    CHECK(std::from_chars(text.data() + 1, end, wide).ptr == end);
    CHECK(static_cast<float>(wide) == number);
  }
}

// The same digits as the C++ library finds, for both signs.
void FloatsHaveTheFewestDigits(uint64_t stride) {
  for (uint64_t bits = 0; bits <= UINT32_MAX; bits += stride) {
    const uint32_t narrow = static_cast<uint32_t>(bits);
    float number;
    std::memcpy(&number, &narrow, sizeof(number));
    if (!std::isfinite(number)) continue;
    char ours[32], theirs[32];
    const std::string_view text(ours, static_cast<size_t>(WriteShortest(number, ours) - ours));
    CHECK(text == std::string_view(
                      theirs, static_cast<size_t>(std::to_chars(theirs, theirs + 32, number).ptr - theirs)));
  }
}

}  // namespace
}  // namespace kvtable

int main(int argc, char** argv) {
  kvtable::WholeBodiesAreReadAndCutOnesAreNot();
  kvtable::OnlyIntegersInRangeAreKeys();
  kvtable::ChangedBodiesAreReadWithinTheirBytes();
  kvtable::FramesAreReadWithinTheirBytes();
  kvtable::HeadsAreMatchedWithinTheirBytes();
  kvtable::InferencesAreReadWithinTheirBytes();
  kvtable::FloatsHaveTheFewestDigits(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 4099);
  kvtable::FloatsKeepTheirBits(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 4099);
}
