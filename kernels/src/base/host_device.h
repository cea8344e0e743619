// Marks a function that runs on the host and, where nvcc compiles it, on a GPU, too.
#pragma once

#if defined(__CUDACC__)
#define KVTABLE_HOST_DEVICE __host__ __device__
#else
#define KVTABLE_HOST_DEVICE
#endif

// Before a loop of few steps, known when compiling: unrolled on a GPU, so that what it indexes stays in
// registers.
#if defined(__CUDA_ARCH__)
#define KVTABLE_UNROLL _Pragma("unroll")
#else
#define KVTABLE_UNROLL
#endif
