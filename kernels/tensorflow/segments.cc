#include "segments.h"

#include "errors.h"

namespace kvtools {

namespace tf = tensorflow;

absl::Status ReadSegments(const tf::Tensor& segments, const tf::Tensor* shape, int64_t outer,
                          kvtable::BagsInput* in) {
  if (outer < 0) {
    if (segments.dims() != 1 || segments.NumElements() < 1) {
      return errors::InvalidArgument("row splits must be a vector of 1 element or more, got shape ",
                                     segments.shape().DebugString());
    }
    in->splits = static_cast<const int64_t*>(segments.data());
    in->bags = segments.NumElements() - 1;
    return absl::OkStatus();
  }
  if (shape == nullptr) return errors::InvalidArgument("a shape is missing");
  const int64_t rank = shape->NumElements();
  if (outer == 0) outer = rank - 1;
  if (segments.dims() != 2 || segments.dim_size(0) != in->n || segments.dim_size(1) != rank ||
      shape->dims() != 1 || outer < 1 || outer > rank) {
    return errors::InvalidArgument("indices of ", in->n, " ids in a SparseTensor of rank ", rank,
                                   " are of shape ", segments.shape().DebugString(), ", expected [", in->n,
                                   ", ", rank, "] with rank 2 or more");
  }
  in->indices = static_cast<const int64_t*>(segments.data());
  in->rank = rank;
  in->shape = static_cast<const int64_t*>(shape->data());
  in->outer = outer;
  tf::TensorShape rows;  // checks for overflow
  for (int64_t d = 0; d < outer; ++d) TF_RETURN_IF_ERROR(rows.AddDimWithStatus(in->shape[d]));
  in->bags = rows.num_elements();
  return absl::OkStatus();
}

absl::Status ReadCombiners(const std::vector<std::string>& names, std::vector<kvtable::Combiner>* combiners) {
  for (const std::string& name : names) {
    if (name != "sum" && name != "mean" && name != "sqrtn") {
      return errors::InvalidArgument("combiner must be sum, mean or sqrtn, got '", name, "'");
    }
    combiners->push_back(name == "sum"    ? kvtable::Combiner::kSum
                         : name == "mean" ? kvtable::Combiner::kMean
                                          : kvtable::Combiner::kSqrtN);
  }
  return absl::OkStatus();
}

absl::Status CheckWeightsType(tf::DataType rows, tf::DataType weights) {
  const tf::DataType expected = rows == tf::DT_DOUBLE ? tf::DT_DOUBLE : tf::DT_FLOAT;
  if (weights == expected) return absl::OkStatus();
  return errors::InvalidArgument("weights for rows of ", tf::DataTypeString(rows), " are ",
                                 tf::DataTypeString(expected), ", got ", tf::DataTypeString(weights));
}

}  // namespace kvtools
