#include "base/instruction_set.h"

#include <cstdlib>
#include <cstring>

namespace kvtable {
namespace {

InstructionSet Detect() {
#if defined(__x86_64__)
  const char* const most = std::getenv("KVTABLE_ISA");
  const auto allowed = [&](const char* name) { return most == nullptr || std::strcmp(most, name) == 0; };
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
  if (avx2 && allowed("avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    return InstructionSet::kAvx512;
  }
  if (avx2 && (allowed("avx2") || allowed("avx512"))) return InstructionSet::kAvx2;
#endif
  return InstructionSet::kBaseline;
}

}  // namespace

InstructionSet BestInstructionSet() {
  static const InstructionSet best = Detect();
  return best;
}

}  // namespace kvtable
