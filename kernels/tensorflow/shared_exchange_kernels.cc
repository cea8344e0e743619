// Alltoall through shared memory.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "arrival.h"
#include "current_exchange.h"
#include "errors.h"
#include "huge_output.h"
#include "kernel.h"
#include "kernel_threads.h"
#include "tensorflow/core/framework/allocation_description.pb.h"
#include "tensorflow/core/framework/cancellation.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;
using kvtable::ExchangeFailure;
using kvtable::SharedBuffer;
using kvtable::SharedExchange;
using tf::OpKernelContext;
using tf::Tensor;
using tf::TensorShape;

constexpr int64_t kLeastToShare = 16 << 10;       // bytes; less is copied in less time
constexpr int64_t kCopyBytes = int64_t{1} << 20;  // at a time
constexpr uint64_t kNoLoop = 0;                   // the frame of what is in no loop

struct Current {
  std::mutex mutex;
  std::shared_ptr<SharedExchange> exchange;
};

Current& TheCurrent() {
  static Current* const current = new Current;  // never destroyed: its thread may run as the process ends
  return *current;
}

// The memory of a tensor that other ranks can read.
class SharedTensorBuffer : public tf::TensorBuffer {
 public:
  SharedTensorBuffer(std::shared_ptr<SharedBuffer> buffer, size_t bytes)
      : TensorBuffer(buffer->data()), buffer_(std::move(buffer)), bytes_(bytes) {}

  size_t size() const override { return bytes_; }
  TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(tf::AllocationDescription* description) const override {
    description->set_requested_bytes(static_cast<int64_t>(bytes_));
    description->set_allocated_bytes(buffer_->bytes());
    description->set_allocator_name("kvtools memory that ranks share");
  }
  bool OwnsMemory() const override { return true; }

 private:
  const std::shared_ptr<SharedBuffer> buffer_;
  const size_t bytes_;
};

absl::Status StatusOf(const ExchangeFailure& failure) {
  switch (failure.kind) {
    case ExchangeFailure::Kind::kOtherKind:
      return errors::InvalidArgument(failure.what, ".");
    case ExchangeFailure::Kind::kCancelled:
      return absl::CancelledError(failure.what + ".");
    case ExchangeFailure::Kind::kNoResource:
      return errors::ResourceExhausted(failure.what, ".");
    case ExchangeFailure::Kind::kStalled:
      return absl::DeadlineExceededError(failure.what + ".");
    case ExchangeFailure::Kind::kRankLost:
      break;
  }
  return absl::UnknownError(failure.what + ".");
}

// Makes the exchange of this process.
class ConnectOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status SetUp(tf::OpKernelConstruction* ctx) override {
    return ReadAttrs(ctx, "rank", &rank_, "sockets", &sockets_, "warn_after_s", &warn_after_s_,
                     "fail_after_s", &fail_after_s_);
  }

  absl::Status Work(OpKernelContext*) override {
    SharedExchange::Options options;
    options.warn_after = std::chrono::seconds(warn_after_s_);
    options.fail_after = std::chrono::seconds(fail_after_s_);
    options.warn = [](const std::string& text) { std::fprintf(stderr, "kvtools: %s.\n", text.c_str()); };
    std::shared_ptr<SharedExchange> exchange;
    if (!sockets_.empty()) {
      exchange = std::make_shared<SharedExchange>(rank_, sockets_, std::move(options));
    }
    // What the end of this process leaves unsent is lost, and the others would fail in a step that this rank has done.
    [[maybe_unused]] static const int at_exit = std::atexit([] {
      const std::shared_ptr<SharedExchange> last = CurrentExchange();
      if (last != nullptr && !last->is_of_parent()) last->AwaitSent();
    });
    const std::lock_guard<std::mutex> hold(TheCurrent().mutex);
    TheCurrent().exchange.swap(exchange);
    return absl::OkStatus();
  }

 private:
  int rank_ = 0;
  std::vector<int> sockets_;
  int64_t warn_after_s_ = 0;
  int64_t fail_after_s_ = 0;
};

class ArrivalSizeOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status Work(OpKernelContext* ctx) override {
    Received received;
    TF_RETURN_IF_ERROR(received.Read(ctx->input(0)));
    Tensor* size = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({}), &size));
    size->scalar<int64_t>()() = received.elements();
    return absl::OkStatus();
  }
};

// One that is under way, and how its step may cancel it.
class Running {
 public:
  Running(OpKernelContext* ctx, const std::shared_ptr<SharedExchange>& exchange)
      : exchange_(exchange), cancellation_(ctx->cancellation_manager()) {}

  // Whether the step has not been cancelled yet.
  static bool Register(const std::shared_ptr<Running>& running) {
    if (running->cancellation_ == nullptr) return true;
    running->token_ = running->cancellation_->get_cancellation_token();
    return running->cancellation_->RegisterCallback(running->token_, [running] { running->Cancel(); });
  }

  void Deregister() {
    if (cancellation_ != nullptr) cancellation_->TryDeregisterCallback(token_);
  }

  void Started(uint64_t number) {
    bool cancel;
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      number_ = number;
      cancel = cancelled_;
    }
    if (cancel) Cancel(number);
  }

 private:
  void Cancel() {
    uint64_t number;
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      cancelled_ = true;
      number = number_;
    }
    if (number != 0) Cancel(number);
  }
  void Cancel(uint64_t number) {
    if (const std::shared_ptr<SharedExchange> exchange = exchange_.lock()) exchange->Cancel(number);
  }

  const std::weak_ptr<SharedExchange> exchange_;  // which ends what is under way as it goes
  tf::CancellationManager* const cancellation_;
  tf::CancellationToken token_ = 0;
  std::mutex mutex_;
  uint64_t number_ = 0;
  bool cancelled_ = false;
};

// Gives a tensor, or, with `kInPlace`, an Arrival.
template <bool kInPlace>
class SharedAlltoallOp : public AsyncKernel {
 public:
  using AsyncKernel::AsyncKernel;

 protected:
  absl::Status SetUp(tf::OpKernelConstruction* ctx) override {
    // A function that is called twice has the op twice, with names of their own. An eager one has no name.
    TF_RETURN_IF_ERROR(ReadAttrs(ctx, "exchange", &name_, "ranks", &ranks_));
    if (name() != type_string()) absl::StrAppend(&name_, " of ", name());
    return absl::OkStatus();
  }

  absl::Status Start(OpKernelContext* ctx, const DoneCallback& done) override {
    const std::shared_ptr<SharedExchange> exchange = CurrentExchange();
    if (exchange == nullptr || exchange->ranks() != ranks_) {
      return errors::FailedPrecondition(
          "exchange '", name_, "' is among ", ranks_, " ranks that share memory, and this process has ",
          exchange == nullptr ? 0 : exchange->ranks(), ": call sok.init(), and make the graph anew.");
    }
    SharedExchange::Sent sent;
    TF_RETURN_IF_ERROR(ToSend(ctx, exchange.get(), &sent));
    const auto running = std::make_shared<Running>(ctx, exchange);
    if (!Running::Register(running)) {
      return absl::CancelledError(absl::StrCat("exchange '", name_, "' was cancelled."));
    }
    const int64_t row = RowBytes(ctx->input(0));
    try {
      running->Started(exchange->Start(
          std::move(sent),
          [this, ctx, done, running, row](std::shared_ptr<const SharedExchange::Arrival> arrival,
                                          const ExchangeFailure* failure) {
            running->Deregister();
            const absl::Status failed = failure == nullptr ? absl::OkStatus() : StatusOf(*failure);
            auto end = [this, ctx, done, row, arrival = std::move(arrival), failed]() mutable {
              End(ctx, done, [&]() -> absl::Status {
                TF_RETURN_IF_ERROR(failed);
                const absl::Status received = Receive(ctx, arrival, row);
                arrival.reset();  // before `done`: the others may go on
                return received;
              });
            };
            // Not on the exchange's own thread, for which others wait.
            if (ctx->runner() != nullptr) {
              (*ctx->runner())(std::move(end));
            } else {
              end();
            }
          }));
    } catch (...) {
      running->Deregister();
      throw;
    }
    return absl::OkStatus();
  }

 private:
  // Iterations of a loop may run at the same time, and each rank may begin them in another order.
  std::string NameOf(OpKernelContext* ctx) const {
    const tf::FrameAndIter at = ctx->frame_iter();
    if (at.frame_id == kNoLoop || at.frame_id == tf::kIllegalFrameId) return name_;
    return absl::StrCat(name_, ", iteration ", at.iter_id, " of loop ", absl::Hex(at.frame_id));
  }

  absl::Status ToSend(OpKernelContext* ctx, SharedExchange* exchange, SharedExchange::Sent* sent) const {
    const Tensor& tensor = ctx->input(0);
    const Tensor& splits = ctx->input(1);
    if (tensor.dims() < 1) return errors::InvalidArgument("what is sent must have rows, got a scalar");
    if (splits.NumElements() != ranks_) {
      return errors::InvalidArgument("splits must be ", ranks_, " numbers, one for each rank, got ",
                                     splits.shape().DebugString());
    }
    const int64_t row = RowBytes(tensor);
    int64_t rows = 0;
    for (int r = 0; r < ranks_; ++r) {
      const int64_t count = splits.flat<int32_t>()(r);
      if (count < 0) return errors::InvalidArgument("splits must be 0 or more, got ", count);
      rows += count;
      sent->bytes.push_back(count * row);
    }
    if (rows != tensor.dim_size(0)) {
      return errors::InvalidArgument("splits are of ", rows, " rows, and there are ", tensor.dim_size(0));
    }
    sent->name = NameOf(ctx);
    TensorShape of_row = tensor.shape();
    of_row.RemoveDim(0);
    sent->kind = absl::StrCat(tf::DataTypeString(tensor.dtype()), " rows of ", of_row.DebugString());
    const int64_t bytes = rows * row;
    if (bytes == 0) return absl::OkStatus();
    sent->data = static_cast<const char*>(tensor.data());
    sent->buffer = exchange->Holding(sent->data, bytes);
    if (sent->buffer == nullptr) {
      try {
        sent->buffer = exchange->Take(bytes);
      } catch (const kvtable::Error& error) {
        sent->problem = error.what();  // for all ranks: the others would wait
        return absl::OkStatus();
      }
      KernelThreads threads(ctx);
      Copy({{sent->data, bytes}}, sent->buffer->data(), &threads);
      sent->data = sent->buffer->data();
      sent->owner = sent->buffer;
    } else {
      // Nobody may write to it as long as others read: a tensor that somebody else has is not written to.
      sent->owner = std::make_shared<Tensor>(tensor);
    }
    return absl::OkStatus();
  }

  static absl::Status Receive(OpKernelContext* ctx,
                              const std::shared_ptr<const SharedExchange::Arrival>& arrival, int64_t row) {
    Tensor* splits = nullptr;
    const int64_t ranks = static_cast<int64_t>(arrival->pieces.size());
    TF_RETURN_IF_ERROR(ctx->allocate_output(1, TensorShape({ranks}), &splits));
    int64_t rows = 0;
    for (int64_t r = 0; r < ranks; ++r) {
      const int64_t bytes = arrival->pieces[static_cast<size_t>(r)].bytes;
      const int64_t count = row == 0 ? 0 : bytes / row;
      splits->flat<int32_t>()(r) = static_cast<int32_t>(count);
      rows += count;
    }
    if constexpr (kInPlace) {
      Tensor* out = nullptr;
      TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({1}), &out));
      out->flat<tf::Variant>()(0) = Arrival{arrival, ctx->input_dtype(0)};
      return absl::OkStatus();
    }
    TensorShape shape = ctx->input(0).shape();
    shape.set_dim(0, rows);
    Tensor* received = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, shape, &received));
    WantHugePages(ctx, *received);
    KernelThreads threads(ctx);
    Copy(arrival->pieces, static_cast<char*>(received->data()), &threads);
    return absl::OkStatus();
  }

  static int64_t RowBytes(const Tensor& tensor) {
    int64_t bytes = tf::DataTypeSize(tensor.dtype());
    for (int d = 1; d < tensor.dims(); ++d) bytes *= tensor.dim_size(d);
    return bytes;
  }

  // The pieces, one after the other.
  static void Copy(const std::vector<SharedExchange::Piece>& pieces, char* to, KernelThreads* threads) {
    struct Task {
      const char* from;
      char* to;
      int64_t bytes;
    };
    std::vector<Task> tasks;
    for (const SharedExchange::Piece& piece : pieces) {
      for (int64_t at = 0; at < piece.bytes; at += kCopyBytes) {
        tasks.push_back({piece.data + at, to + at, std::min(kCopyBytes, piece.bytes - at)});
      }
      to += piece.bytes;
    }
    threads->Run(static_cast<int64_t>(tasks.size()), [&](int64_t t) {
      const Task& task = tasks[static_cast<size_t>(t)];
      std::memcpy(task.to, task.from, static_cast<size_t>(task.bytes));
    });
  }

  std::string name_;
  int ranks_ = 0;
};

KVTOOLS_REGISTER(Name("KvSharedExchangeConnect"), ConnectOp);
KVTOOLS_REGISTER(Name("KvSharedAlltoall")
                     .HostMemory("tensor")
                     .HostMemory("splits")
                     .HostMemory("received")
                     .HostMemory("received_splits"),
                 SharedAlltoallOp<false>);
KVTOOLS_REGISTER(Name("KvSharedExchange")
                     .HostMemory("tensor")
                     .HostMemory("splits")
                     .HostMemory("arrival")
                     .HostMemory("received_splits"),
                 SharedAlltoallOp<true>);
KVTOOLS_REGISTER(Name("KvSharedExchangeSize").HostMemory("arrival").HostMemory("size"), ArrivalSizeOp);

}  // namespace

std::shared_ptr<kvtable::SharedExchange> CurrentExchange() {
  const std::lock_guard<std::mutex> hold(TheCurrent().mutex);
  return TheCurrent().exchange;
}

absl::Status AllocateToSend(tf::OpKernelContext* ctx, int index, const TensorShape& shape, Tensor** output) {
  const tf::DataType dtype = ctx->expected_output_dtype(index);
  const int64_t bytes = shape.num_elements() * tf::DataTypeSize(dtype);
  if (bytes >= kLeastToShare) {
    const std::shared_ptr<SharedExchange> exchange = CurrentExchange();
    std::shared_ptr<SharedBuffer> shared;
    try {
      if (exchange != nullptr && !exchange->is_of_parent()) shared = exchange->Take(bytes);
    } catch (const kvtable::Error&) {
      // This op would fail on this rank alone. The alltoall behind it tries again, and tells all ranks.
    }
    if (shared != nullptr) {
      const tf::core::RefCountPtr<tf::TensorBuffer> buffer(
          new SharedTensorBuffer(std::move(shared), static_cast<size_t>(bytes)));
      ctx->set_output(index, Tensor(dtype, shape, buffer.get()));
      *output = ctx->mutable_output(index);
      return absl::OkStatus();
    }
  }
  TF_RETURN_IF_ERROR(ctx->allocate_output(index, shape, output));
  WantHugePages(ctx, **output);
  return absl::OkStatus();
}

}  // namespace kvtools
