// Lookups in the protocols of others, as clients write them: TensorFlow Serving's REST (":predict") and the Open Inference
// Protocol's ("/infer", with or without binary tensors). What they may say besides, or what is wrong with them, is
// server/tensorflow_rest.py's and server/kserve_rest.py's to tell: what is taken here they take, too, with the same result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace kvtable {

struct PredictRequest {
  std::string_view signature;             // empty: the one by default
  bool by_rows = false;                   // "instances"; else "inputs"
  std::vector<int64_t> ids;               // one at least
  std::vector<std::string_view> outputs;  // as "output_filter" names them, two at most; none: all
};

// Reads {"signature_name": "emb", "instances": [1, 2]}, {"inputs": [1, 2]}, and the same with the input's name "ids":
// {"instances": [{"ids": 1}]}, {"inputs": {"ids": [1]}}, and with "output_filter". False: it is none of these, or has more
// than `max_ids`.
bool ReadPredict(std::string_view body, int64_t max_ids, PredictRequest* request);

struct InferRequest {
  struct Output {
    std::string_view name;
    bool binary = false;
  };
  std::string_view signature;  // empty: the one by default
  bool has_id = false;
  std::string_view id;  // plain characters, none of which JSON writes in another way
  std::vector<int64_t> shape;
  std::vector<int64_t> ids;     // of that shape, one at least
  std::vector<Output> outputs;  // as they are named; none: all, binary where `all_binary`
  bool all_binary = false;
};

// Reads a request for int64 "ids" that stand in the JSON, or behind its `json_bytes`. False as above.
bool ReadInfer(std::string_view body, size_t json_bytes, int64_t max_ids, InferRequest* request);

}  // namespace kvtable
