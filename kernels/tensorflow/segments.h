// Which id is in which row of a pooled lookup, out of what ops are given.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvtable/bags.h"
#include "tensorflow/core/framework/tensor.h"

namespace kvtools {

// Fills in the rows of `in`, whose number of ids is set. `outer` is an entry of the attribute of KvTablePool;
// `shape` is looked at where it is not negative.
absl::Status ReadSegments(const tensorflow::Tensor& segments, const tensorflow::Tensor* shape, int64_t outer,
                          kvtable::BagsInput* in);

// "sum", "mean" or "sqrtn" each.
absl::Status ReadCombiners(const std::vector<std::string>& names, std::vector<kvtable::Combiner>* combiners);

// Weights of double rows are double, of others float.
absl::Status CheckWeightsType(tensorflow::DataType rows, tensorflow::DataType weights);

}  // namespace kvtools
