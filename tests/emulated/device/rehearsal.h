// Rehearsal: the device without arithmetic, for models that no memory here would hold. Tensors have their shapes and
// addresses, but no pages; nothing is computed; and what is launched is written down in order, for `playback.py` to play
// it against durations.
//
// Kernels still say what they return, by torch's rules for tensors without data (its "meta" device). Where a value is
// read it is 0.
#pragma once

#include <sys/mman.h>

#include <string>
#include <vector>

#include "journal.h"

namespace emulated {

// One thing that the program asked of the device.
struct Asked {
  std::string what;  // "kernel", "collective", "record", "wait", "wait for collective", "allocate", "free", "mark"
  std::string name;  // of the operation
  Agent agent = 0;   // the stream; of memory its pool
  size_t other = 0;  // of a record or wait the event, of a wait the collective's place, of a collective the caller
  size_t group = 0;  // of a collective
  size_t bytes = 0;  // that a kernel touches, a collective makes whole, or of memory
  bool ours = false; // a kernel of the sharding, not of the model
  std::vector<std::vector<int64_t>> shapes;  // a kernel's tensors
};

struct Rehearsal {
  bool on = false;
  std::vector<Asked> asked;
  py::object is_sharding;  // () -> whether a line of the sharding is running
};

inline Rehearsal& rehearsal() {
  static Rehearsal* made = new Rehearsal;
  return *made;
}

inline bool rehearses() {
  return rehearsal().on;
}

// Returns its place.
inline size_t ask_for(Asked asked) {
  Lock lock(clocks().mutex);
  rehearsal().asked.push_back(std::move(asked));
  return rehearsal().asked.size() - 1;
}

inline bool runs_sharding() {
  py::gil_scoped_acquire lock;
  return py::cast<bool>(rehearsal().is_sharding());
}

// Addresses for so many bytes; pages come where somebody reads or writes.
inline void* reserve(size_t bytes) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) throw std::bad_alloc();
  return address;
}

}  // namespace emulated
