// Which processor a thread runs on.
#pragma once

#include <cstdint>

namespace kvtable {

// Which of `count` things (at least 1) a thread begins with on the processor where it runs now: so that threads on
// different ones begin as far from each other as can be, and one that comes back to a processor begins where the last
// one did that ran there, whose cache lines it finds.
uint64_t PlaceOfProcessor(uint64_t count);

}  // namespace kvtable
