// Choosing among functions compiled for several instruction sets, when the library is loaded.
#pragma once

namespace kvtable {

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };

// The best that this CPU has; the variable KVTABLE_ISA (baseline, avx2, avx512) may ask for less.
InstructionSet BestInstructionSet();

#if defined(__x86_64__)
#define KVTABLE_TARGET_AVX2 __attribute__((target("avx2,f16c,bmi2")))
#define KVTABLE_TARGET_AVX512 __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,f16c,bmi2")))
#endif

}  // namespace kvtable
