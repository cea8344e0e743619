// The ops of lookups over several ranks: names, signatures and shapes.
//
// Keys go out by KvExchangeRequest, an alltoall, and KvExchangeServe; rows come back by KvExchangeReply, an
// alltoall, and KvExchangePool. The alltoall is Horovod's, or KvSharedAlltoall. T is the number of lookups, each of one
// table. Rows travel in a buffer of Tflat, or, where it is a variant, of Twire: as they are, or in 16 bits where they are
// of float.

#include "shape_functions.h"

namespace kvtools {
namespace {

absl::Status FlatShape(InferenceContext* c) {
  c->set_output(0, c->Vector(c->UnknownDim()));
  return absl::OkStatus();
}

// The number of tables, T, and attribute `dims`.
absl::Status GetDims(InferenceContext* c, int* tables, std::vector<int64_t>* dims) {
  TF_RETURN_IF_ERROR(c->GetAttr("T", tables));
  return GetCounts(c, "dims", *tables, dims);
}

absl::Status GetDims(InferenceContext* c, int* tables) {
  std::vector<int64_t> dims;
  return GetDims(c, tables, &dims);
}

// Of any number of the rows that are sent, and of how many each rank sent.
absl::Status AlltoallShape(InferenceContext* c, ShapeHandle* received) {
  int64_t ranks;
  ShapeHandle sent;
  TF_RETURN_IF_ERROR(c->GetAttr("ranks", &ranks));
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &sent));
  TF_RETURN_IF_ERROR(c->ReplaceDim(sent, 0, c->UnknownDim(), received));
  c->set_output(1, c->Vector(ranks));
  return absl::OkStatus();
}

}  // namespace

// The exchange of this process through memory that it shares with the other ranks: sockets[r] is of SOCK_SEQPACKET and
// to rank r, -1 for the rank itself. None at all: there is no such exchange any more. An exchange that waits for longer
// than warn_after_s is told of, and for longer than fail_after_s fails; 0: never.
REGISTER_OP("KvSharedExchangeConnect")
    .Attr("rank: int >= 0")
    .Attr("sockets: list(int) >= 0")
    .Attr("warn_after_s: int >= 0")
    .Attr("fail_after_s: int >= 0")
    .SetIsStateful();

// Sends splits[r] rows of a tensor to each rank r, in order, and gives what the others sent, that of rank 0 first, and
// how many rows each did. `exchange`: the same on all ranks, and of no other exchange under way. Not stateful: in a
// function nothing else that is waits for an exchange, or keeps it waiting.
REGISTER_OP("KvSharedAlltoall")
    .Attr("T: {int32, int64, uint64, half, bfloat16, float, double}")
    .Attr("exchange: string")
    .Attr("ranks: int >= 1")
    .Input("tensor: T")
    .Input("splits: int32")
    .Output("received: T")
    .Output("received_splits: int32")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle received;
      TF_RETURN_IF_ERROR(AlltoallShape(c, &received));
      c->set_output(0, received);
      return absl::OkStatus();
    });

// The same, left where it lies: a variant [1] that the ops below take in place of a buffer. A buffer of any length is
// its gradient, and it may be one of a buffer, so that its shape is told as theirs.
REGISTER_OP("KvSharedExchange")
    .Attr("T: {int32, int64, uint64, half, bfloat16, float, double}")
    .Attr("exchange: string")
    .Attr("ranks: int >= 1")
    .Input("tensor: T")
    .Input("splits: int32")
    .Output("arrival: variant")
    .Output("received_splits: int32")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle received;
      TF_RETURN_IF_ERROR(AlltoallShape(c, &received));
      return FlatShape(c);
    });

// How many elements came.
REGISTER_OP("KvSharedExchangeSize")
    .Input("arrival: variant")
    .Output("size: int64")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    });

// What this rank asks the others for: the message to each, one after the other, and their lengths. A message
// has each key once, whatever ids have it, as kvtable/exchange_message.h says; places[t] is, for each id, at
// which element of the rows that come back its row begins.
//
// lookup: what is looked up, in text: a line for the whole and one for each table. KvExchangeServe fails on all
// ranks where it is not the same on all.
//
// owners[t]: the rank that holds table t; -1 where it is key floor-mod ranks. rows[t]: ids must be in
// [0, rows[t]); -1 where they are keys, which must be of key_dtypes[t]. hotness[t]: the most ids of a row; -1
// for any number. Segments, shapes and weights are as of KvTablePool; the segments of weights, which must be
// those of their ids, come too, or none do. Ids that are none of what they should
// be do not fail this op: it sends an error to all ranks, and KvExchangeServe fails on each.
//
// Stateful, so that nobody folds it, and with it the exchange, into a constant.
REGISTER_OP("KvExchangeRequest")
    .Attr("Tids: list({int64, int32, uint64}) >= 1")
    .Attr("Tweights: {float, double} = DT_FLOAT")
    .Attr("T: int >= 1")
    .Attr("S: int >= 0")
    .Attr("W: int >= 0")
    .Attr("V: int >= 0 = 0")
    .Attr("rank: int >= 0")
    .Attr("ranks: int >= 1")
    .Attr("names: list(string) >= 1")
    .Attr("owners: list(int) >= 1")
    .Attr("rows: list(int) >= 1")
    .Attr("key_dtypes: list({int64, int32, uint64}) >= 1")
    .Attr("dims: list(int) >= 1")
    .Attr("hotness: list(int) >= 1")
    .Attr("outer: list(int) >= 1")
    .Attr("weighted: list(bool) >= 1")
    .Attr("lookup: string = ''")
    .Input("ids: Tids")
    .Input("segments: T * int64")
    .Input("shapes: S * int64")
    .Input("weights: W * Tweights")
    .Input("weight_segments: V * int64")
    .Output("message: int64")
    .Output("splits: int32")
    .Output("places: T * int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int tables;
      int64_t ranks;
      std::vector<int64_t> dims;
      TF_RETURN_IF_ERROR(c->GetAttr("T", &tables));
      TF_RETURN_IF_ERROR(c->GetAttr("ranks", &ranks));
      TF_RETURN_IF_ERROR(GetCounts(c, "dims", tables, &dims));
      for (const char* list : {"owners", "rows", "hotness", "outer"}) {
        TF_RETURN_IF_ERROR(CheckList<int64_t>(c, list, tables));
      }
      TF_RETURN_IF_ERROR(CheckList<std::string>(c, "names", tables));
      TF_RETURN_IF_ERROR(CheckList<tensorflow::DataType>(c, "key_dtypes", tables));
      TF_RETURN_IF_ERROR(CheckList<tensorflow::DataType>(c, "Tids", tables));
      TF_RETURN_IF_ERROR(CheckList<bool>(c, "weighted", tables));
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Vector(ranks));
      for (int t = 0; t < tables; ++t) c->set_output(2 + t, c->input(t));
      return absl::OkStatus();
    });

// The keys of each table that the ranks ask this one for, those of rank 0 first, and their numbers (ranks,
// T). With local[t] not keys, but the numbers of local rows: key / ranks. Fails where a rank sent an
// error, or looks up something else.
REGISTER_OP("KvExchangeServe")
    .Attr("Tout: list({int64, int32, uint64}) >= 1")
    .Attr("ranks: int >= 1")
    .Attr("local: list(bool) >= 1")
    .Input("message: int64")
    .Input("splits: int32")
    .Output("keys: Tout")
    .Output("counts: int64")
    .SetShapeFn([](InferenceContext* c) {
      int64_t ranks;
      TF_RETURN_IF_ERROR(c->GetAttr("ranks", &ranks));
      const int tables = c->num_outputs() - 1;
      TF_RETURN_IF_ERROR(CheckList<bool>(c, "local", tables));
      for (int t = 0; t < tables; ++t) c->set_output(t, c->Vector(c->UnknownDim()));
      c->set_output(tables, c->Matrix(ranks, tables));
      return absl::OkStatus();
    });

// The rows of these keys, looked up as by KvTableGatherMany and put together as by KvExchangeReply, which it is
// in one. Where the lookup fails the op does not: what comes out tells all ranks of it (reply_error.h).
REGISTER_OP("KvExchangeGather")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double}")
    .Attr("Tflat: {float, half, bfloat16, double} = DT_FLOAT")
    .Attr("H: int >= 1")
    .Attr("T: int >= 1")
    .Attr("parts: list(int) >= 1")
    .Attr("dims: list(int) >= 1")
    .Attr("mode: {'train', 'zeros', 'initial'} = 'train'")
    .Attr("remember: bool = false")
    .Attr("in_backward: list(string) = []")
    .Input("handles: H * resource")
    .Input("keys: T * Tkeys")
    .Input("counts: int64")
    .Output("flat: Tflat")
    .Output("splits: int32")
    .Output("positions: T * int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TableAttrs all;
      bool remember;
      ShapeHandle counts;
      TF_RETURN_IF_ERROR(all.Get(c));
      TF_RETURN_IF_ERROR(CheckInBackward(c, all.handles));
      TF_RETURN_IF_ERROR(c->GetAttr("remember", &remember));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(all.handles + all.tables), 2, &counts));
      c->set_output(1, c->Vector(c->Dim(counts, 0)));
      for (int t = 0; t < all.tables; ++t) {
        c->set_output(2 + t, remember ? c->input(all.handles + t) : c->Vector(0));
      }
      return FlatShape(c);
    });

// The rows of these keys, put together for each rank: its rows of table 0, of table 1, ...; and how many
// elements each rank gets.
REGISTER_OP("KvExchangeReply")
    .Attr("dtype: {float, half, bfloat16, double}")
    .Attr("Tflat: {float, half, bfloat16, double} = DT_FLOAT")
    .Attr("T: int >= 1")
    .Attr("dims: list(int) >= 1")
    .Input("rows: T * dtype")
    .Input("counts: int64")
    .Output("flat: Tflat")
    .Output("splits: int32")
    .SetShapeFn([](InferenceContext* c) {
      int tables;
      ShapeHandle counts;
      TF_RETURN_IF_ERROR(GetDims(c, &tables));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(tables), 2, &counts));
      c->set_output(1, c->Vector(c->Dim(counts, 0)));
      return FlatShape(c);
    });

// Rows that were put together, as they are; or, where an error is not empty, what tells all ranks of it
// (reply_error.h).
REGISTER_OP("KvExchangeTell")
    .Attr("Tflat: {float, half, bfloat16, double}")
    .Attr("E: int >= 1")
    .Attr("T: int >= 1")
    .Attr("dims: list(int) >= 1")
    .Input("rows: Tflat")
    .Input("row_splits: int32")
    .Input("counts: int64")
    .Input("errors: E * string")
    .Output("flat: Tflat")
    .Output("splits: int32")
    .SetShapeFn([](InferenceContext* c) {
      int tables;
      TF_RETURN_IF_ERROR(GetDims(c, &tables));
      c->set_output(1, c->input(1));
      return FlatShape(c);
    });

// Fails where a rank has sent an error in place of the rows that `message` asked it for.
REGISTER_OP("KvExchangeCheck")
    .Attr("Tflat: {float, half, bfloat16, double, variant}")
    .Attr("T: int >= 1")
    .Attr("dims: list(int) >= 1")
    .Input("message: int64")
    .Input("message_splits: int32")
    .Input("flat: Tflat")
    .Input("splits: int32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int tables;
      return GetDims(c, &tables);
    });

// Its gradient: taken apart again.
REGISTER_OP("KvExchangeReplyGradient")
    .Attr("dtype: {float, half, bfloat16, double}")
    .Attr("Tflat: {float, half, bfloat16, double, variant} = DT_FLOAT")
    .Attr("Twire: {float, half, bfloat16, double} = DT_FLOAT")
    .Attr("T: int >= 1")
    .Attr("dims: list(int) >= 1")
    .Input("flat: Tflat")
    .Input("counts: int64")
    .Output("rows: T * dtype")
    .SetShapeFn([](InferenceContext* c) {
      int tables;
      std::vector<int64_t> dims;
      TF_RETURN_IF_ERROR(GetDims(c, &tables, &dims));
      for (int t = 0; t < tables; ++t) {
        c->set_output(t, c->Matrix(c->UnknownDim(), dims[static_cast<size_t>(t)]));
      }
      return absl::OkStatus();
    });

// Pools the rows that came back. Weights are of double for double rows, else of float.
REGISTER_OP("KvExchangePool")
    .Attr("dtype: {float, half, bfloat16, double}")
    .Attr("Tflat: {float, half, bfloat16, double, variant} = DT_FLOAT")
    .Attr("Twire: {float, half, bfloat16, double} = DT_FLOAT")
    .Attr("Tweights: {float, double} = DT_FLOAT")
    .Attr("T: int >= 1")
    .Attr("S: int >= 0")
    .Attr("W: int >= 0")
    .Attr("dims: list(int) >= 1")
    .Attr("combiners: list(string) >= 1")
    .Attr("outer: list(int) >= 1")
    .Attr("weighted: list(bool) >= 1")
    .Input("flat: Tflat")
    .Input("places: T * int64")
    .Input("segments: T * int64")
    .Input("shapes: S * int64")
    .Input("weights: W * Tweights")
    .Output("rows: T * dtype")
    .SetShapeFn([](InferenceContext* c) {
      int tables;
      std::vector<int64_t> dims, outer;
      TF_RETURN_IF_ERROR(GetDims(c, &tables, &dims));
      TF_RETURN_IF_ERROR(CheckPooledLists(c, tables, false, &outer));
      return SetPooledShapes(c, 1 + tables, dims, outer);
    });

// Its gradient with respect to these rows, of which there are `size` elements.
REGISTER_OP("KvExchangePoolGradient")
    .Attr("dtype: {float, half, bfloat16, double}")
    .Attr("Tflat: {float, half, bfloat16, double} = DT_FLOAT")
    .Attr("Tweights: {float, double} = DT_FLOAT")
    .Attr("T: int >= 1")
    .Attr("S: int >= 0")
    .Attr("W: int >= 0")
    .Attr("dims: list(int) >= 1")
    .Attr("combiners: list(string) >= 1")
    .Attr("outer: list(int) >= 1")
    .Attr("weighted: list(bool) >= 1")
    .Input("size: int64")
    .Input("gradients: T * dtype")
    .Input("places: T * int64")
    .Input("segments: T * int64")
    .Input("shapes: S * int64")
    .Input("weights: W * Tweights")
    .Output("flat: Tflat")
    .SetShapeFn([](InferenceContext* c) {
      int tables;
      std::vector<int64_t> outer;
      TF_RETURN_IF_ERROR(GetDims(c, &tables));
      TF_RETURN_IF_ERROR(CheckPooledLists(c, tables, false, &outer));
      return FlatShape(c);
    });

// Its gradient with respect to the weights.
REGISTER_OP("KvExchangePoolWeightsGradient")
    .Attr("dtype: {float, half, bfloat16, double}")
    .Attr("Tflat: {float, half, bfloat16, double, variant} = DT_FLOAT")
    .Attr("Twire: {float, half, bfloat16, double} = DT_FLOAT")
    .Attr("Tweights: {float, double} = DT_FLOAT")
    .Attr("T: int >= 1")
    .Attr("S: int >= 0")
    .Attr("W: int >= 1")
    .Attr("dims: list(int) >= 1")
    .Attr("combiners: list(string) >= 1")
    .Attr("outer: list(int) >= 1")
    .Attr("weighted: list(bool) >= 1")
    .Input("flat: Tflat")
    .Input("rows: T * dtype")
    .Input("gradients: T * dtype")
    .Input("places: T * int64")
    .Input("segments: T * int64")
    .Input("shapes: S * int64")
    .Input("weights: W * Tweights")
    .Output("weight_gradients: W * Tweights")
    .SetShapeFn([](InferenceContext* c) {
      int tables, sparse, weights;
      std::vector<int64_t> outer;
      TF_RETURN_IF_ERROR(GetDims(c, &tables));
      TF_RETURN_IF_ERROR(CheckPooledLists(c, tables, false, &outer));
      TF_RETURN_IF_ERROR(c->GetAttr("S", &sparse));
      TF_RETURN_IF_ERROR(c->GetAttr("W", &weights));
      for (int w = 0; w < weights; ++w) c->set_output(w, c->input(1 + 4 * tables + sparse + w));
      return absl::OkStatus();
    });

}  // namespace kvtools
