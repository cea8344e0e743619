// Marks a function that runs on the host and, where nvcc compiles it, on a GPU, too.
#pragma once

#if defined(__CUDACC__)
#define KVTABLE_HOST_DEVICE __host__ __device__
#else
#define KVTABLE_HOST_DEVICE
#endif
