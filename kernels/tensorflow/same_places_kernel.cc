// The kernel that compares places.

#include <cstring>
#include <string>

#include "errors.h"
#include "kernel.h"

namespace kvtools {
namespace {

namespace tf = tensorflow;

class SamePlacesOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status SetUp(tf::OpKernelConstruction* ctx) override { return ReadAttrs(ctx, "message", &message_); }

  absl::Status Work(tf::OpKernelContext* ctx) override {
    tf::OpInputList of_ids, of_weights;
    TF_RETURN_IF_ERROR(ctx->input_list("of_ids", &of_ids));
    TF_RETURN_IF_ERROR(ctx->input_list("of_weights", &of_weights));
    for (int i = 0; i < of_ids.size(); ++i) {
      const tf::Tensor &one = of_ids[i], &other = of_weights[i];
      // The same memory needs no look.
      if (one.shape() != other.shape() ||
          (one.data() != other.data() && std::memcmp(one.data(), other.data(), one.TotalBytes()) != 0)) {
        return errors::InvalidArgument(message_);
      }
    }
    ctx->set_output(0, ctx->input(0));
    return absl::OkStatus();
  }

 private:
  std::string message_;
};

KVTOOLS_REGISTER(Name("KvSamePlaces")
                     .HostMemory("weights")
                     .HostMemory("of_ids")
                     .HostMemory("of_weights")
                     .HostMemory("checked"),
                 SamePlacesOp);

}  // namespace
}  // namespace kvtools
