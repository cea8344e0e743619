#include "serving/inference_request.h"

#include <cstring>
#include <optional>

#include "serving/json_reader.h"

namespace kvtable {
namespace {

constexpr size_t kMostDimensions = 8;

bool ReadIds(JsonReader& reader, size_t most, std::vector<int64_t>* ids) {
  return reader.List([&] {
    int64_t id;
    if (ids->size() == most || !reader.Int(&id)) return false;
    ids->push_back(id);
    return true;
  });
}

// {"ids": ...}, of which `read` reads the value.
template <class Read>
bool ReadNamed(JsonReader& reader, const Read& read) {
  bool there = false;
  return reader.Object([&](std::string_view name) {
    if (name != "ids" || there) return false;
    there = true;
    return read();
  }) && there;
}

bool ReadInstances(JsonReader& reader, size_t most, std::vector<int64_t>* ids) {
  JsonReader ahead = reader;
  if (!ahead.Take('[') || ahead.Peek() != '{') return ReadIds(reader, most, ids);
  return reader.List([&] {
    return ids->size() < most && ReadNamed(
                                     reader,
                                     [&] {
                                       int64_t id;
                                       if (!reader.Int(&id)) return false;
                                       ids->push_back(id);
                                       return true;
                                     });
  });
}

bool IsPlain(std::string_view text) {
  for (const char c : text) {
    if (c < ' ' || c >= 0x7f) return false;
  }
  return true;
}

struct Input {
  bool named = false, typed = false, shaped = false, listed = false;
  std::optional<int64_t> binary_bytes;
};

bool ReadInput(JsonReader& reader, size_t most, InferRequest* request, Input* input) {
  return reader.Object([&](std::string_view name) {
    std::string_view text;
    if (name == "name" && !input->named) {
      input->named = true;
      return reader.Text(&text) && text == "ids";
    }
    if (name == "datatype" && !input->typed) {
      input->typed = true;
      return reader.Text(&text) && text == "INT64";
    }
    if (name == "shape" && !input->shaped) {
      input->shaped = true;
      return ReadIds(reader, kMostDimensions, &request->shape);
    }
    if (name == "data" && !input->listed) {
      input->listed = true;
      return ReadIds(reader, most, &request->ids);
    }
    if (name == "parameters" && !input->binary_bytes) {
      return reader.Object([&](std::string_view parameter) {
        int64_t bytes;
        if (parameter != "binary_data_size" || input->binary_bytes || !reader.Int(&bytes)) return false;
        input->binary_bytes = bytes;
        return true;
      });
    }
    return false;
  });
}

bool ReadOutput(JsonReader& reader, std::string_view* output, std::optional<bool>* binary) {
  bool named = false, has_parameters = false;
  return reader.Object([&](std::string_view name) {
    if (name == "name" && !named) {
      named = true;
      return reader.Text(output);
    }
    if (name != "parameters" || has_parameters) return false;
    has_parameters = true;
    return reader.Object([&](std::string_view parameter) {
      bool flag;
      if (parameter != "binary_data" || *binary || !reader.Flag(&flag)) return false;
      *binary = flag;
      return true;
    });
  }) && named;
}

}  // namespace

bool ReadPredict(std::string_view body, int64_t max_ids, PredictRequest* request) {
  JsonReader reader(body);
  const size_t most = static_cast<size_t>(max_ids);
  bool signed_for = false, asked = false, filtered = false;
  const bool read = reader.Object([&](std::string_view name) {
    if (name == "signature_name" && !signed_for) {
      signed_for = true;
      return reader.Text(&request->signature);
    }
    if (name == "output_filter" && !filtered) {
      filtered = true;
      return reader.List([&] {
        std::string_view output;
        if (request->outputs.size() == 2 || !reader.Text(&output)) return false;
        request->outputs.push_back(output);
        return true;
      });
    }
    if (asked) return false;
    asked = true;
    if (name == "instances") {
      request->by_rows = true;
      return ReadInstances(reader, most, &request->ids);
    }
    if (name != "inputs") return false;
    if (reader.Peek() != '{') return ReadIds(reader, most, &request->ids);
    return ReadNamed(reader, [&] { return ReadIds(reader, most, &request->ids); });
  });
  if (request->outputs.size() == 2 && request->outputs[0] == request->outputs[1]) return false;
  return read && reader.AtEnd() && asked && !request->ids.empty();
}

bool ReadInfer(std::string_view body, size_t json_bytes, int64_t max_ids, InferRequest* request) {
  if (json_bytes > body.size()) return false;
  JsonReader reader(body.substr(0, json_bytes));
  const std::string_view rest = body.substr(json_bytes);
  const size_t most = static_cast<size_t>(max_ids);
  bool has_inputs = false, has_outputs = false, has_parameters = false, has_signature = false;
  std::optional<bool> all_binary;
  std::vector<std::optional<bool>> binary;
  Input input;
  const bool read = reader.Object([&](std::string_view name) {
    if (name == "id" && !request->has_id) {
      request->has_id = true;
      return reader.Text(&request->id) && IsPlain(request->id);
    }
    if (name == "inputs" && !has_inputs) {
      bool one = false;
      has_inputs = true;
      return reader.List([&] {
        if (one) return false;
        one = true;
        return ReadInput(reader, most, request, &input);
      }) && one;
    }
    if (name == "outputs" && !has_outputs) {
      has_outputs = true;
      return reader.List([&] {
        std::string_view output;
        std::optional<bool> flag;
        if (request->outputs.size() == 2 || !ReadOutput(reader, &output, &flag)) return false;
        request->outputs.push_back({output, false});
        binary.push_back(flag);
        return true;
      });
    }
    if (name != "parameters" || has_parameters) return false;
    has_parameters = true;
    return reader.Object([&](std::string_view parameter) {
      bool flag;
      if (parameter == "binary_data_output" && !all_binary) {
        if (!reader.Flag(&flag)) return false;
        all_binary = flag;
        return true;
      }
      if (parameter != "signature_name" || has_signature) return false;
      has_signature = true;
      return reader.Text(&request->signature);
    });
  });
  if (!read || !reader.AtEnd() || !has_inputs || !input.named || !input.typed || !input.shaped) return false;
  request->all_binary = all_binary.value_or(false);
  for (size_t i = 0; i < binary.size(); ++i)
    request->outputs[i].binary = binary[i].value_or(request->all_binary);
  if (request->outputs.size() == 2 && request->outputs[0].name == request->outputs[1].name) return false;
  if (input.listed == input.binary_bytes.has_value()) return false;
  if (input.binary_bytes) {
    const auto bytes = static_cast<int64_t>(rest.size());
    if (*input.binary_bytes != bytes || bytes % 8 != 0 || bytes / 8 > max_ids) return false;
    request->ids.resize(rest.size() / 8);
    if (!rest.empty()) std::memcpy(request->ids.data(), rest.data(), rest.size());
  } else if (!rest.empty()) {
    return false;
  }
  int64_t count = 1;
  for (const int64_t size : request->shape) {
    if (size < 1 || size > max_ids || count > max_ids) return false;
    count *= size;
  }
  return !request->shape.empty() && !request->ids.empty() &&
         count == static_cast<int64_t>(request->ids.size());
}

}  // namespace kvtable
