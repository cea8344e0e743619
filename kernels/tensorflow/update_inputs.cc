#include "update_inputs.h"

#include <utility>

#include "errors.h"
#include "kernel.h"

namespace kvtools {

namespace tf = tensorflow;

namespace {

void Append(const tf::Tensor& input, std::vector<double>* numbers) {
  const auto all = [&](auto flat) {
    for (int64_t i = 0; i < flat.size(); ++i) numbers->push_back(static_cast<double>(flat(i)));
  };
  switch (input.dtype()) {
    case tf::DT_FLOAT:
      return all(input.flat<float>());
    case tf::DT_DOUBLE:
      return all(input.flat<double>());
    case tf::DT_INT32:
      return all(input.flat<int32_t>());
    default:
      return all(input.flat<int64_t>());
  }
}

}  // namespace

absl::Status UpdateInputs::Read(tf::OpKernelConstruction* ctx) {
  TF_RETURN_IF_ERROR(ReadAttrs(ctx, "optimizer", &optimizer_, "names", &names_, "skip_nonfinite",
                               &skip_nonfinite_, "stochastic_rounding", &stochastic_rounding_));
  kvtable::FindOptimizer(optimizer_);
  return absl::OkStatus();
}

absl::Status UpdateInputs::Make(tf::OpKernelContext* ctx, const std::string& variable,
                                kvtable::Update* update) const {
  tf::OpInputList inputs;
  TF_RETURN_IF_ERROR(ctx->input_list("hyperparameters", &inputs));
  std::vector<double> numbers;
  for (const tf::Tensor& input : inputs) Append(input, &numbers);
  if (numbers.size() != names_.size()) {
    return errors::InvalidArgument("Optimizer ", optimizer_, " of '", variable, "' got ", numbers.size(),
                                   " hyperparameters; expected ", names_.size(), ".");
  }
  std::vector<std::pair<std::string, double>> named;
  uint64_t seed = 0;
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (names_[i] == "seed") {
      seed = static_cast<uint64_t>(numbers[i]);
    } else {
      named.emplace_back(names_[i], numbers[i]);
    }
  }
  *update = kvtable::MakeUpdate(optimizer_, named);
  update->seed = seed;
  update->skip_nonfinite = skip_nonfinite_;
  update->stochastic_rounding = stochastic_rounding_;
  kvtable::CheckUpdate(*update);
  return absl::OkStatus();
}

}  // namespace kvtools
