// How the rows of all tables lie in the buffer that goes to all ranks.
#pragma once

#include <algorithm>
#include <vector>

#include "current_exchange.h"
#include "errors.h"
#include "flat_type.h"
#include "kernel_threads.h"

namespace kvtools {

// Where the rows of each table for each rank lie: in the table's rows, and in the flat buffer.
struct ReplyLayout {
  static constexpr int64_t kMostElements = int64_t{1} << 56;  // more than any memory has

  struct Piece {
    int rank;
    int table;
    int64_t in_rows;  // all in elements
    int64_t in_flat;
    int64_t elements;
  };

  // counts (ranks, tables)
  absl::Status Find(const tensorflow::Tensor& counts, const std::vector<int64_t>& dims) {
    if (counts.dims() != 2 || counts.dim_size(1) != static_cast<int64_t>(dims.size())) {
      return errors::InvalidArgument("counts are of shape ", counts.shape().DebugString(),
                                     ", expected [ranks, ", dims.size(), "]");
    }
    rank_elements.assign(static_cast<size_t>(counts.dim_size(0)), 0);
    table_elements.assign(dims.size(), 0);
    for (int64_t r = 0; r < counts.dim_size(0); ++r) {
      for (size_t t = 0; t < dims.size(); ++t) {
        const int64_t count = counts.matrix<int64_t>()(r, static_cast<int64_t>(t));
        if (count < 0 || count > (kMostElements - total) / dims[t]) {
          return errors::InvalidArgument("a rank cannot ask for ", count, " rows of ", dims[t], " elements");
        }
        const int64_t elements = count * dims[t];
        pieces.push_back({static_cast<int>(r), static_cast<int>(t), table_elements[t], total, elements});
        table_elements[t] += elements;
        rank_elements[static_cast<size_t>(r)] += elements;
        total += elements;
      }
    }
    return absl::OkStatus();
  }

  // Outputs 0 and 1: the flat buffer, and how many elements of it each rank gets.
  absl::Status Allocate(tensorflow::OpKernelContext* ctx, tensorflow::Tensor** flat) const {
    TF_RETURN_IF_ERROR(AllocateToSend(ctx, 0, tensorflow::TensorShape({total}), flat));
    const int64_t ranks = static_cast<int64_t>(rank_elements.size());
    tensorflow::Tensor* splits = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(1, tensorflow::TensorShape({ranks}), &splits));
    for (int64_t r = 0; r < ranks; ++r) {
      // The rank that asked has made sure that it is not too much.
      splits->vec<int32_t>()(r) = static_cast<int32_t>(rank_elements[static_cast<size_t>(r)]);
    }
    return absl::OkStatus();
  }

  // Calls body(piece) for each, in parallel.
  template <class Body>
  void ForEachPiece(tensorflow::OpKernelContext* ctx, const Body& body) const {
    KernelThreads threads(ctx);
    threads.Run(static_cast<int64_t>(pieces.size()), [&](int64_t p) {
      if (pieces[static_cast<size_t>(p)].elements > 0) body(pieces[static_cast<size_t>(p)]);
    });
  }

  std::vector<Piece> pieces;
  std::vector<int64_t> rank_elements;
  std::vector<int64_t> table_elements;
  int64_t total = 0;
};

// What rows and the buffer in which they travel are of.
struct ReplyTypes {
  absl::Status Read(tensorflow::OpKernelConstruction* ctx) {
    int tables;
    tensorflow::DataType dtype;
    TF_RETURN_IF_ERROR(ReadAttrs(ctx, "T", &tables, "dims", &dims, "dtype", &dtype));
    if (static_cast<int>(dims.size()) != tables || *std::min_element(dims.begin(), dims.end()) < 1) {
      return errors::InvalidArgument("dims must have ", tables, " entries of 1 or more");
    }
    rows = ToValueType(dtype);
    return ReadFlatType(ctx, dtype, &flat);
  }

  std::vector<int64_t> dims;
  kvtable::ValueType rows;
  kvtable::ValueType flat;
};

}  // namespace kvtools
