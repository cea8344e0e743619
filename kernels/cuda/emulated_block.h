// A block of a GPU's threads on one thread of the CPU, and what CUDA's compiler knows of them: threadIdx and blockDim, shared
// memory, what threads of a warp pass one another, and where all of a block meet. It is there to run the very code that
// is compiled for GPUs (struct Warp) where there is none.
//
// Each emulated thread has a stack of its own and runs until it is to meet others; then the next one runs. Warps take
// turns in an order that is drawn. What would keep a GPU waiting for ever, or mean nothing there, ends the process and
// says why: threads of a warp that meet in different places, or without one that has ended.
#pragma once

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/hash.h"

#define __device__
#define __shared__ static thread_local  // one block at a time runs on a thread

namespace kvtable {

struct EmulatedIndex {
  unsigned x = 0;
};
inline thread_local EmulatedIndex threadIdx;  // NOLINT(readability-identifier-naming): CUDA's names
inline thread_local EmulatedIndex blockDim;   // NOLINT(readability-identifier-naming)

// What runs on a stack of its own, in turns with whoever lets it run.
class Fiber {
 public:
  // Lets run() run from its beginning, on the next Resume. It does not return: its last turn never ends.
  void Start(void (*run)()) {
    if (!stack_) stack_.reset(new char[kStackBytes]);
#if defined(__x86_64__)
    // As Switch leaves a stack behind that is to go on: six registers, and where to go on.
    const uintptr_t top = reinterpret_cast<uintptr_t>(stack_.get() + kStackBytes) / 16 * 16;
    void** const at = reinterpret_cast<void**>(top) - 8;
    std::memset(at, 0, 8 * sizeof(void*));
    at[6] = reinterpret_cast<void*>(run);
    mine_ = at;
#else
    getcontext(&mine_);
    mine_.uc_stack.ss_sp = stack_.get();
    mine_.uc_stack.ss_size = kStackBytes;
    mine_.uc_link = nullptr;
    makecontext(&mine_, run, 0);
#endif
  }
  void Resume() { Switch(&theirs_, &mine_); }
  void Yield() { Switch(&mine_, &theirs_); }

 private:
  static constexpr size_t kStackBytes = size_t{64} << 10;

#if defined(__x86_64__)
  using Context = void*;  // the stack's pointer
  // The registers that a call leaves as they are; the system's own switch asks the kernel for more.
  __attribute__((noinline, naked)) static void Switch(Context* /*from*/, Context* /*to*/) {
    __asm__ volatile(
        "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        "movq %rsp, (%rdi)\n movq (%rsi), %rsp\n"
        "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
  }
#else
  using Context = ucontext_t;
  static void Switch(Context* from, Context* to) { swapcontext(from, to); }
#endif

  std::unique_ptr<char[]> stack_;
  Context mine_;
  Context theirs_;
};

class EmulatedBlock {
 public:
  static constexpr unsigned kLanes = 32;
  static constexpr unsigned kThreads = 96;  // of a block: three warps
  enum class Meeting { kPass, kVote, kMatch, kBlock };

  // That of the calling thread.
  static EmulatedBlock& Current() {
    static thread_local EmulatedBlock block;
    return block;
  }

  // Runs body() for each thread, threadIdx being its own.
  void Run(uint64_t block, const std::function<void()>& body) {
    body_ = &body;
    blockDim.x = kThreads;
    left_ = kThreads;
    for (Warp& warp : warps_) warp = {};
    at_block_ = 0;
    for (Thread& thread : threads_) {
      thread.has_ended = false;
      thread.round = nullptr;
      thread.fiber.Start([] { Current().RunThread(); });
    }
    uint64_t draws = block;
    while (left_ > 0) {
      const uint64_t steps = steps_;
      const unsigned first = static_cast<unsigned>(Mix64(++draws) % kThreads);
      for (unsigned i = 0; i < kThreads; ++i) Resume((first + i) % kThreads);
      if (steps == steps_) Fail("threads wait for others that do not come");
    }
  }

  // Gives x to the lanes of the warp that are set in `mask`, all of which call this, and returns what each gave.
  const uint64_t* Meet(Meeting what, unsigned mask, uint64_t x) {
    const unsigned lane = threadIdx.x % kLanes;
    if ((mask >> lane & 1) == 0) Fail("a thread is not of the mask that it gives");
    Group& group = warps_[threadIdx.x / kLanes].Of(mask);
    if (group.arrived != 0 && group.what != what) Fail("threads of a warp meet in different places");
    if ((group.arrived >> lane & 1) != 0) Fail("a thread meets others a second time before they have come");
    group.what = what;
    const uint64_t round = group.round;
    uint64_t* const given = group.given[round % 2];
    given[lane] = x;
    group.arrived |= 1u << lane;
    ++steps_;
    if (group.arrived == mask) {
      group.arrived = 0;
      ++group.round;
    }
    Await(&group.round, round);
    return given;
  }

  void MeetAll() {
    if (left_ != kThreads) Fail("a block meets without a thread that has ended");
    const uint64_t round = block_round_;
    ++steps_;
    if (++at_block_ == kThreads) {
      at_block_ = 0;
      ++block_round_;
    }
    Await(&block_round_, round);
  }

 private:
  struct Group {
    Meeting what = Meeting::kPass;
    unsigned arrived = 0;
    uint64_t round = 0;
    uint64_t given[2][kLanes] = {};
  };
  struct Warp {
    Group& Of(unsigned mask) {
      for (auto& [of, group] : groups) {
        if (of == mask) return group;
      }
      return groups.emplace_back(mask, Group()).second;
    }
    std::deque<std::pair<unsigned, Group>> groups;  // by mask
  };
  struct Thread {
    Fiber fiber;
    bool has_ended = false;
    const uint64_t* round = nullptr;  // that it waits for the end of; null: for none
    uint64_t awaited = 0;
  };

  [[noreturn]] static void Fail(const char* why) {
    std::fprintf(stderr, "Emulated block, thread %u: %s.\n", threadIdx.x, why);
    std::abort();
  }

  void RunThread() {
    (*body_)();
    threads_[threadIdx.x].has_ended = true;
    --left_;
    ++steps_;
    for (;;) threads_[threadIdx.x].fiber.Yield();
  }
  void Resume(unsigned t) {
    Thread& thread = threads_[t];
    if (thread.has_ended || (thread.round != nullptr && *thread.round == thread.awaited)) return;
    threadIdx.x = t;
    thread.fiber.Resume();
  }
  void Await(const uint64_t* round, uint64_t awaited) {
    Thread& thread = threads_[threadIdx.x];
    thread.round = round;
    thread.awaited = awaited;
    while (*round == awaited) thread.fiber.Yield();
    thread.round = nullptr;
  }

  Thread threads_[kThreads];
  Warp warps_[kThreads / kLanes];
  const std::function<void()>* body_ = nullptr;
  unsigned left_ = 0;
  unsigned at_block_ = 0;
  uint64_t block_round_ = 0;
  uint64_t steps_ = 0;
};

// NOLINTBEGIN: CUDA's names
template <class T>
uint64_t EmulatedBits(T x) {
  uint64_t bits = 0;
  static_assert(sizeof(T) <= sizeof(bits));
  std::memcpy(&bits, &x, sizeof(T));
  return bits;
}
template <class T>
T FromEmulatedBits(uint64_t bits) {
  T x;
  std::memcpy(&x, &bits, sizeof(T));
  return x;
}
template <class T>
T EmulatedPass(unsigned mask, T x, unsigned from) {
  using Block = EmulatedBlock;
  const uint64_t* const given = Block::Current().Meet(Block::Meeting::kPass, mask, EmulatedBits(x));
  return (mask >> from & 1) != 0 ? FromEmulatedBits<T>(given[from]) : x;
}
// Lanes count within segments of `width`; what comes from beyond is a lane's own.
template <class T>
T __shfl_sync(unsigned mask, T x, unsigned from, unsigned width = 32) {
  const unsigned lane = threadIdx.x % 32;
  return EmulatedPass(mask, x, lane / width * width + from % width);
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, unsigned by, unsigned width = 32) {
  const unsigned lane = threadIdx.x % 32;
  return EmulatedPass(mask, x, lane % width >= by ? lane - by : lane);
}
template <class T>
T __shfl_down_sync(unsigned mask, T x, unsigned by, unsigned width = 32) {
  const unsigned lane = threadIdx.x % 32;
  return EmulatedPass(mask, x, lane % width + by < width ? lane + by : lane);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, unsigned bits) {
  return EmulatedPass(mask, x, (threadIdx.x % 32) ^ bits);
}
inline unsigned __ballot_sync(unsigned mask, bool x) {
  using Block = EmulatedBlock;
  const uint64_t* const given = Block::Current().Meet(Block::Meeting::kVote, mask, x ? 1 : 0);
  unsigned votes = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) != 0 && given[lane] != 0) votes |= 1u << lane;
  }
  return votes;
}
inline int __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0 ? 1 : 0; }
inline unsigned __match_any_sync(unsigned mask, unsigned x) {
  using Block = EmulatedBlock;
  const uint64_t* const given = Block::Current().Meet(Block::Meeting::kMatch, mask, x);
  unsigned same = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) != 0 && given[lane] == x) same |= 1u << lane;
  }
  return same;
}
inline void __syncthreads() { EmulatedBlock::Current().MeetAll(); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
// NOLINTEND

}  // namespace kvtable
