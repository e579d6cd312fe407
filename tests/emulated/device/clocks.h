// Clocks: the host and every stream has a vector clock, and whoever waits for another takes over what that one knows.
//
// A kernel is one tick of its stream. A kernel knows of another if its stream's clock has reached the other's tick: by
// the order in the stream, by an event, or because the host waited and launched afterwards. Two kernels of which neither
// knows the other may run at the same time on a real device, whatever the order in which they happened to run here.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace emulated {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

using Agent = size_t;  // the host or a stream
using Ticks = uint64_t;
constexpr Agent kHost = 0;

inline c10::Device device_at(int index) {
  return c10::Device(kDevice, static_cast<c10::DeviceIndex>(index));
}

class Clock {
 public:
  Ticks of(Agent agent) const {
    return agent < ticks_.size() ? ticks_[agent] : 0;
  }
  Ticks tick(Agent agent) {
    if (ticks_.size() <= agent) ticks_.resize(agent + 1);
    return ++ticks_[agent];
  }
  void join(const Clock& other) {
    if (ticks_.size() < other.ticks_.size()) ticks_.resize(other.ticks_.size());
    for (size_t i = 0; i < other.ticks_.size(); ++i) ticks_[i] = std::max(ticks_[i], other.ticks_[i]);
  }

 private:
  std::vector<Ticks> ticks_;
};

// The clocks of one process. Whoever reads or changes anything of the device holds the mutex, and never asks for
// Python's lock while it does.
struct Clocks {
  std::recursive_mutex mutex;
  std::vector<Clock> of{Clock()};  // by agent
  std::map<std::pair<int, int64_t>, Agent> streams;
  std::vector<int64_t> next_stream;  // by device
  int devices = 1;

  Agent agent(int device, int64_t stream) {
    auto [place, is_new] = streams.try_emplace({device, stream}, of.size());
    if (is_new) of.emplace_back();
    return place->second;
  }
  Agent agent(const c10::Stream& stream) {
    return agent(stream.device_index(), stream.id());
  }
  std::string name(Agent agent) const {
    for (auto& [key, value] : streams)
      if (value == agent) return "stream " + std::to_string(key.second) + " of device " + std::to_string(key.first);
    return "the host";
  }
  // Nothing of a stream runs before the host has launched it.
  Clock& launching(Agent agent) {
    of[agent].join(of[kHost]);
    return of[agent];
  }
};

inline Clocks& clocks() {
  static Clocks* made = new Clocks;  // never destroyed: tensors may outlive the program's statics
  return *made;
}
using Lock = std::lock_guard<std::recursive_mutex>;

// What is current in this thread, as CUDA has it.
struct Current {
  int device = 0;
  std::map<int, int64_t> streams;

  int64_t stream(int of_device) const {
    auto found = streams.find(of_device);
    return found == streams.end() ? 0 : found->second;
  }
};

inline Current& current() {
  thread_local Current here;
  return here;
}

inline Agent current_agent(int device) {
  Lock lock(clocks().mutex);
  return clocks().agent(device, current().stream(device));
}

}  // namespace emulated
