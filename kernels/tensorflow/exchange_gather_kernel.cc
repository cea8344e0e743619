// Rows that ranks ask for, out of tables and straight into the buffer that goes to the ranks.

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "errors.h"
#include "kernel.h"
#include "kernel_threads.h"
#include "kvtable/convert_elements.h"
#include "kvtable/lookup_parts.h"
#include "reply_error.h"
#include "reply_layout.h"
#include "table_list.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using tf::OpKernelConstruction;
using tf::OpKernelContext;
using tf::Tensor;

constexpr int64_t kScratchBytes = int64_t{256}
                                  << 10;  // of rows that are looked up and then converted, in cache
constexpr int64_t kLeastScratchRows = 1024;

class ExchangeGatherOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status SetUp(OpKernelConstruction* ctx) override {
    TF_RETURN_IF_ERROR(attrs_.Read(ctx));
    TF_RETURN_IF_ERROR(types_.Read(ctx));
    return ReadAttrs(ctx, "mode", &mode_, "remember", &remember_, "Tkeys", &key_dtype_, "dtype", &dtype_);
  }

  absl::Status Work(OpKernelContext* ctx) override {
    tf::OpInputList keys;
    TF_RETURN_IF_ERROR(ctx->input_list("keys", &keys));
    ReplyLayout layout;
    TF_RETURN_IF_ERROR(layout.Find(ctx->input(ctx->num_inputs() - 1), attrs_.dims));
    for (int t = 0; t < attrs_.tables(); ++t) {
      const int64_t n = keys[t].NumElements();
      if (n * types_.dims[static_cast<size_t>(t)] != layout.table_elements[static_cast<size_t>(t)]) {
        return errors::InvalidArgument("there are ", n, " keys of table ", t, ", and counts of others");
      }
    }
    const absl::Status found = CatchErrors("looking up", "", [&] { return Reply(ctx, keys, layout); });
    if (found.ok()) return found;
    for (int t = 0; t < attrs_.tables(); ++t) {
      Tensor* none = nullptr;
      delete ctx->release_output(2 + t).tensor;
      TF_RETURN_IF_ERROR(ctx->allocate_output(2 + t, tf::TensorShape({0}), &none));
    }
    for (const int i : {0, 1}) delete ctx->release_output(i).tensor;
    return SendError(ctx, layout.rank_elements, ctx->expected_output_dtype(0), CodeAndMessage(found));
  }

 private:
  absl::Status Reply(OpKernelContext* ctx, const tf::OpInputList& keys, const ReplyLayout& layout) const {
    TableList tables;
    TF_RETURN_IF_ERROR(tables.Find(ctx, attrs_, key_dtype_, dtype_));
    KernelThreads threads(ctx);
    std::vector<kvtable::PartsLookup> all;  // of each table
    for (int t = 0; t < attrs_.tables(); ++t) {
      const int64_t n = keys[t].NumElements();
      Tensor* positions = nullptr;
      TF_RETURN_IF_ERROR(
          ctx->allocate_output(2 + t, remember_ ? keys[t].shape() : tf::TensorShape({0}), &positions));
      const kvtable::RowsOut out(nullptr, remember_ ? static_cast<uint64_t*>(positions->data()) : nullptr);
      all.push_back({tables.host_parts(t), keys[t].data(), n, out, MissingKeysOf(mode_, tables.resource(t))});
      TF_RETURN_IF_ERROR(CheckFits(ctx, tables.config(t), all.back().missing, all.back().keys, n,
                                   static_cast<int64_t>(all.back().parts.size()), &threads));
    }
    Tensor* flat = nullptr;
    TF_RETURN_IF_ERROR(layout.Allocate(ctx, &flat));
    return tables.Catch("looking up", [&] {
      LookUp(layout, all, static_cast<char*>(flat->data()), &threads);
      return absl::OkStatus();
    });
  }

  void LookUp(const ReplyLayout& layout, const std::vector<kvtable::PartsLookup>& all, char* flat,
              kvtable::ParallelFor* threads) const {
    std::vector<kvtable::PartsLookup> in_place, aside;
    std::vector<std::unique_ptr<char[]>> rows_aside;
    std::vector<ReplyLayout::Piece> to_copy, to_convert;
    std::vector<const char*> rows_of(all.size());
    for (size_t t = 0; t < all.size(); ++t) {
      if (!kvtable::IsOneBatch(all[t].parts, all[t].missing)) continue;
      // All ranks' keys at once, so all rows at once.
      rows_aside.emplace_back(new char[static_cast<size_t>(layout.table_elements[t] * row_element())]);
      rows_of[t] = rows_aside.back().get();
      aside.push_back(all[t]);
      aside.back().out.rows = rows_aside.back().get();
    }
    for (const ReplyLayout::Piece& piece : layout.pieces) {
      if (piece.elements == 0) continue;
      const size_t t = static_cast<size_t>(piece.table);
      if (rows_of[t] != nullptr) {
        to_copy.push_back(piece);
      } else if (types_.rows == types_.flat) {
        in_place.push_back(Of(all[t], piece, flat + piece.in_flat * row_element()));
      } else {
        const int64_t dim = types_.dims[t];
        const int64_t most = std::max(kLeastScratchRows, kScratchBytes / (dim * row_element())) * dim;
        for (int64_t at = 0; at < piece.elements; at += most) {
          to_convert.push_back({piece.rank, piece.table, piece.in_rows + at, piece.in_flat + at,
                                std::min(most, piece.elements - at)});
        }
      }
    }
    if (!in_place.empty()) kvtable::LookUpParts(in_place, *threads);
    threads->Run(static_cast<int64_t>(to_convert.size()), [&](int64_t p) {
      const ReplyLayout::Piece& piece = to_convert[static_cast<size_t>(p)];
      const std::unique_ptr<char[]> rows(new char[static_cast<size_t>(piece.elements * row_element())]);
      kvtable::LookUpParts(Of(all[static_cast<size_t>(piece.table)], piece, rows.get()));
      Convert(rows.get(), piece, flat);
    });
    if (!aside.empty()) kvtable::LookUpParts(aside, *threads);
    threads->Run(static_cast<int64_t>(to_copy.size()), [&](int64_t p) {
      const ReplyLayout::Piece& piece = to_copy[static_cast<size_t>(p)];
      Convert(rows_of[static_cast<size_t>(piece.table)] + piece.in_rows * row_element(), piece, flat);
    });
  }

  // The part of a table's lookup that is for one rank.
  kvtable::PartsLookup Of(const kvtable::PartsLookup& table, const ReplyLayout::Piece& piece,
                          char* rows) const {
    const int64_t dim = types_.dims[static_cast<size_t>(piece.table)];
    const int64_t first = piece.in_rows / dim;
    kvtable::PartsLookup part = table;
    part.keys = static_cast<const char*>(table.keys) + first * tf::DataTypeSize(key_dtype_);
    part.n = piece.elements / dim;
    part.out.rows = rows;
    if (part.out.positions != nullptr) part.out.positions += first;
    return part;
  }

  void Convert(const char* rows, const ReplyLayout::Piece& piece, char* flat) const {
    kvtable::ConvertElements(types_.rows, rows, piece.elements, types_.flat,
                             flat + piece.in_flat * kvtable::SizeOf(types_.flat));
  }

  int64_t row_element() const { return kvtable::SizeOf(types_.rows); }

  TableListAttrs attrs_;
  ReplyTypes types_;
  std::string mode_;
  bool remember_ = false;
  tf::DataType key_dtype_;
  tf::DataType dtype_;
};

KVTOOLS_REGISTER(Name("KvExchangeGather")
                     .HostMemory("keys")
                     .HostMemory("counts")
                     .HostMemory("flat")
                     .HostMemory("splits")
                     .HostMemory("positions"),
                 ExchangeGatherOp);

}  // namespace
}  // namespace kvtools
