// Accesses: which bytes every kernel reads and writes. Two accesses conflict if they overlap and one of them writes; a
// conflict that no clock orders is a race, and reported.
#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "journal.h"

namespace emulated {

struct Access {
  size_t begin, end;  // bytes of the block
  Agent agent;
  Ticks when;
  bool writes;
  std::string by;

  std::string describe() const {
    return std::string(writes ? "the write" : "the read") + " by " + by + " on " + clocks().name(agent);
  }
};

struct Block {
  char* memory;
  size_t bytes;
  int device;
  Agent pool;  // the stream to which the memory returns; of pinned memory the host
  bool pinned;
  std::string made_at;
  std::set<Agent> recorded;          // record_stream
  std::vector<Access> accesses;      // those with which a later one may still conflict
  std::vector<Access> before_reuse;  // those by which an earlier owner of memory from the same pool may still use it

  void add(Access mine) {
    const Clock& known = clocks().of[mine.agent];
    for (auto& earlier : before_reuse)
      if (earlier.agent != mine.agent && known.of(earlier.agent) < earlier.when)
        report("reuse: " + mine.describe() + " may be to memory of which " + earlier.by);
    before_reuse.clear();
    std::vector<Access> kept;
    for (auto& other : accesses) {
      bool ordered = other.agent == mine.agent || known.of(other.agent) >= other.when;
      bool overlap = other.begin < mine.end && mine.begin < other.end;
      if (overlap && !ordered && (other.writes || mine.writes))
        report("race: " + mine.describe() + " does not wait for " + other.describe() + " (" + std::to_string(bytes) +
               " bytes made at " + made_at + ")");
      // Whoever conflicts with an access that this one comes after, and covers, conflicts with this one too.
      bool covered = mine.begin <= other.begin && other.end <= mine.end;
      bool stands_for = mine.writes ? ordered : other.agent == mine.agent && !other.writes;
      if (!(covered && stands_for)) kept.push_back(std::move(other));
    }
    kept.push_back(std::move(mine));
    accesses = std::move(kept);
  }
};

}  // namespace emulated
