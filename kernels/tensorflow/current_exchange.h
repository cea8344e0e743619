// The exchange through shared memory that this process has with the other ranks, if it has one.
#pragma once

#include <memory>

#include "kvtable/shared_exchange.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace kvtools {

// Null where ranks exchange by other means.
std::shared_ptr<kvtable::SharedExchange> CurrentExchange();

// As ctx->allocate_output, for what goes to the other ranks: where they can read it, if it is large.
absl::Status AllocateToSend(tensorflow::OpKernelContext* ctx, int index, const tensorflow::TensorShape& shape,
                            tensorflow::Tensor** output);

}  // namespace kvtools
