// Lanes: the threads that run one kernel body together. A body has one key per lane, and the lanes help one
// another with rows, so that a row is read and written in whole memory transactions.
//
// On a GPU the lanes are a warp, always all 32 of them: whoever has no key is there all the same. On a CPU
// thread there is one lane, and the same bodies compile to plain loops. A warp without any key runs no body, but one
// that says kWholeBlocks.
#pragma once

#include <cstdint>
#include <type_traits>

#include "atomics.h"
#include "base/host_device.h"
#if defined(KVTABLE_EMULATES_WARPS)
#include "emulated_block.h"
#endif

namespace kvtable {

struct OneLane {
  static constexpr uint32_t kCount = 1;

  KVTABLE_HOST_DEVICE uint32_t lane() const { return 0; }
  // What lane `from` passes as `x`.
  template <class T>
  KVTABLE_HOST_DEVICE T From(uint32_t /*from*/, T x) const {
    return x;
  }
  KVTABLE_HOST_DEVICE bool Any(bool x) const { return x; }
  // Adds to the counter how many lanes are `counted`, and returns where the lane itself comes among all that
  // ever were.
  KVTABLE_HOST_DEVICE uint32_t Count(bool counted, uint32_t* counter) const {
    return counted ? FetchAdd(counter, 1u) : 0;
  }
  // Adds to the counter how many each lane has, and returns where the lane's own begin. One step for a whole block:
  // threads of a GPU that count take turns, whichever warp they are of. Each warp of the block is to call it equally
  // often, so the body says kWholeBlocks.
  KVTABLE_HOST_DEVICE uint32_t CountInBlock(uint32_t mine, uint32_t* counter) const {
    return mine == 0 ? 0 : FetchAdd(counter, mine);
  }
  // A bit for each lane that passes the same x, this one included.
  KVTABLE_HOST_DEVICE uint32_t Same(uint32_t /*x*/) const { return 1; }
  // The sum over all lanes.
  template <class C>
  KVTABLE_HOST_DEVICE C Sum(C x) const {
    return x;
  }
  // Adds one to counters[which] for each lane that is `counted`.
  KVTABLE_HOST_DEVICE void CountEach(bool counted, uint32_t which, uint32_t* counters) const {
    if (counted) FetchAdd(&counters[which], 1u);
  }
};

#if defined(__CUDACC__) || defined(KVTABLE_EMULATES_WARPS)
struct Warp {
  static constexpr uint32_t kCount = 32;
  static constexpr unsigned kAll = 0xffffffffu;
  static constexpr uint32_t kMostInBlock = 32;  // warps

  __device__ uint32_t lane() const { return threadIdx.x % 32; }
  template <class T>
  __device__ T From(uint32_t from, T x) const {
    if constexpr (std::is_pointer_v<T>) {
      return reinterpret_cast<T>(__shfl_sync(kAll, reinterpret_cast<unsigned long long>(x), from));
    } else if constexpr (sizeof(T) == 8) {
      return static_cast<T>(__shfl_sync(kAll, static_cast<unsigned long long>(x), from));
    } else {
      return static_cast<T>(__shfl_sync(kAll, static_cast<unsigned>(x), from));
    }
  }
  __device__ bool Any(bool x) const { return __any_sync(kAll, x) != 0; }
  __device__ uint32_t Count(bool counted, uint32_t* counter) const {
    const unsigned mask = __ballot_sync(kAll, counted);
    uint32_t first = 0;
    if (mask != 0 && lane() == 0) first = FetchAdd(counter, static_cast<uint32_t>(__popc(mask)));
    first = From(0, first);
    return first + __popc(mask & ((1u << lane()) - 1));
  }
  // The sum of what this lane and those before it pass.
  __device__ uint32_t SumUpTo(uint32_t x) const {
    for (uint32_t step = 1; step < kCount; step *= 2) {
      const uint32_t before = __shfl_up_sync(kAll, x, step);
      if (lane() >= step) x += before;
    }
    return x;
  }
  __device__ uint32_t CountInBlock(uint32_t mine, uint32_t* counter) const {
    __shared__ uint32_t of_warps[kMostInBlock];  // how many each has, then where its own begin
    const uint32_t warp = threadIdx.x / kCount;
    const uint32_t sum = SumUpTo(mine);
    __syncthreads();  // all have read what was there
    if (lane() == kCount - 1) of_warps[warp] = sum;
    __syncthreads();
    if (warp == 0) {
      const bool is_warp = lane() < blockDim.x / kCount;
      const uint32_t theirs = is_warp ? of_warps[lane()] : 0;
      const uint32_t up_to = SumUpTo(theirs);
      const uint32_t all = From(kCount - 1, up_to);
      uint32_t first = 0;
      if (lane() == 0 && all != 0) first = FetchAdd(counter, all);
      first = From(0, first);
      if (is_warp) of_warps[lane()] = first + up_to - theirs;
    }
    __syncthreads();
    return of_warps[warp] + sum - mine;
  }
  __device__ uint32_t Same(uint32_t x) const { return __match_any_sync(kAll, x); }
  template <class C>
  __device__ C Sum(C x) const {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAll, x, step);
    return x;
  }
  __device__ void CountEach(bool counted, uint32_t which, uint32_t* counters) const {
    const unsigned same = __match_any_sync(kAll, counted ? which : UINT32_MAX);
    const bool speaks = static_cast<uint32_t>(__ffs(static_cast<int>(same))) == lane() + 1;
    if (counted && speaks) FetchAdd(&counters[which], static_cast<uint32_t>(__popc(same)));
  }
};
#endif

// Whether a body is for whole blocks: static constexpr bool kWholeBlocks = true.
template <class Body, class = void>
inline constexpr bool kTakesWholeBlocks = false;
template <class Body>
inline constexpr bool kTakesWholeBlocks<Body, std::void_t<decltype(Body::kWholeBlocks)>> = Body::kWholeBlocks;

#if defined(__CUDACC__) || defined(KVTABLE_EMULATES_WARPS)
// What a thread of a GPU does in a launch of n keys, the how many-th it may be.
template <class Body>
__device__ inline void RunThread(const Body& body, uint64_t thread, uint64_t n) {
  const uint64_t first = thread / Warp::kCount * Warp::kCount;
  if (kTakesWholeBlocks<Body> || first < n) body(Warp{}, first);  // the same for all lanes
}
#endif

KVTABLE_HOST_DEVICE inline uint32_t CountBits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(__popc(bits));
#else
  return static_cast<uint32_t>(__builtin_popcount(bits));
#endif
}

}  // namespace kvtable
