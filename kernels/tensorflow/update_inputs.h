// What the ops of training steps are told about a step: the rule, and its hyperparameters.
#pragma once

#include <string>
#include <vector>

#include "kvtable/optimizer.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace kvtools {

// Hyperparameters come as scalars and vectors whose elements, one after the other, have the given names.
class UpdateInputs {
 public:
  // The attributes. Throws what kvtable::FindOptimizer throws.
  absl::Status Read(tensorflow::OpKernelConstruction* ctx);

  // The inputs. Throws what kvtable::MakeUpdate and CheckUpdate throw.
  absl::Status Make(tensorflow::OpKernelContext* ctx, const std::string& variable,
                    kvtable::Update* update) const;

 private:
  std::string optimizer_;
  std::vector<std::string> names_;  // one may be "seed": of the draws, where rounding is stochastic
  bool skip_nonfinite_ = false;
  bool stochastic_rounding_ = false;
};

}  // namespace kvtools
