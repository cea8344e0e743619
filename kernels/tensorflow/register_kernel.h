// One kernel for CPU and GPU. What the builder names as HostMemory lies there for the kernel on a GPU, too; a
// kernel for which that is all of its tensors works on a GPU's table through copies. Where nobody says where
// an op goes it goes to the CPU, even where there is a GPU.
#pragma once

#include "tensorflow/core/framework/op_kernel.h"

#define KVTOOLS_REGISTER(builder, ...)                                                        \
  REGISTER_KERNEL_BUILDER(builder.Device(::tensorflow::DEVICE_CPU).Priority(1), __VA_ARGS__); \
  REGISTER_KERNEL_BUILDER(builder.Device(::tensorflow::DEVICE_GPU), __VA_ARGS__)
