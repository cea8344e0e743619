// The system calls by which spilled rows come and go, in one place, so that tests can have them fail.
#pragma once

#include <sys/types.h>

#include <cstddef>

namespace kvtable {

// Each as the call that it is named for, but for `allocate`, which returns an errno, or 0.
struct FileCalls {
  ssize_t (*read)(int file, void* to, size_t bytes, off_t offset);
  // Only what the system has in memory: EAGAIN, or another error, where it would have to wait.
  ssize_t (*read_at_once)(int file, void* to, size_t bytes, off_t offset);
  ssize_t (*write)(int file, const void* from, size_t bytes, off_t offset);
  int (*allocate)(int file, off_t offset, off_t bytes);
  // As mincore: the lowest bit of each byte tells whether a page of a mapping is in memory.
  int (*in_memory)(void* mapping, size_t bytes, unsigned char* pages);
};

// Those in use. A test sets them before it has threads.
FileCalls& SpillCalls();

}  // namespace kvtable
