// Journal: what the device has to report, and at which line of Python it happened.
//
//   reports     races, memory handed out too early, misaligned collectives
//   host waits  each moment at which the host would have waited for the device
//   orderings   each wait of a stream or for an event and each record_stream, by the line that asked for it. A test may have those of
//               one line disregarded (the mutation by which it shows that the device would find the line missing)
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <set>
#include <string>
#include <vector>

#include "clocks.h"

namespace emulated {

struct Journal {
  std::vector<std::string> reports, host_waits;
  std::set<std::string> orderings, disregarded;
  bool disregards_all = false;
  bool is_silent = false;  // in a rehearsal nobody looks for lines
  py::object where;   // () -> the lines of Python that are running, innermost first
  py::object origin;  // () -> the line that an ordering is known by
  bool closing = false;
};

inline Journal& journal() {
  static Journal* made = new Journal;
  return *made;
}

inline std::string ask(const py::object& function) {  // not to be called under the clocks' mutex
  if (journal().closing) return "the end of the program";
  py::gil_scoped_acquire lock;
  if (!function) return "set-up";
  try {
    return py::cast<std::string>(function());
  } catch (py::error_already_set& error) {
    return std::string("a line unknown: ") + error.what();
  }
}

inline std::string where() {
  return ask(journal().where);
}

// Whether an ordering, called `what`, holds: always, unless a test wants it away.
inline bool is_ordered(const std::string& what) {
  if (journal().is_silent) return true;
  auto name = what + " at " + ask(journal().origin);
  Lock lock(clocks().mutex);
  journal().orderings.insert(name);
  return !journal().disregards_all && !journal().disregarded.count(name);
}

inline void report(const std::string& text) {
  Lock lock(clocks().mutex);
  journal().reports.push_back(text);
}

// The host waits until it knows what `known` knows.
inline void host_waits(const Clock& known, const std::string& what) {
  auto line = where();
  Lock lock(clocks().mutex);
  clocks().of[kHost].join(known);
  journal().host_waits.push_back(what + " at " + line);
}

}  // namespace emulated
