// Streams and events, as torch's device guard asks for them: an event is a copy of its stream's clock.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace emulated {

struct Event {
  Clock clock;
  size_t number;  // in a rehearsal
};

struct Streams final : c10::impl::DeviceGuardImplInterface {
  using Index = c10::DeviceIndex;

  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_at(current().device); }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current().device = device.index();
  }
  Index deviceCount() const noexcept override { return static_cast<Index>(clocks().devices); }

  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current().stream(index(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    Lock lock(clocks().mutex);
    auto& next = clocks().next_stream;
    if (next.size() <= static_cast<size_t>(index(device))) next.resize(index(device) + 1, 1);
    return stream(device, next[index(device)]++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto before = getStream(to.device());
    current().streams[to.device_index()] = to.id();
    return before;
  }
  // Whoever only asks has waited for nothing: another time the answer might have been no.
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& of) const override {
    host_waits(known_to(of), "stream.synchronize");
  }
  void synchronizeDevice(const Index device) const override {
    Clock all;
    {
      Lock lock(clocks().mutex);
      for (auto& [key, agent] : clocks().streams)
        if (key.first == device) all.join(clocks().of[agent]);
    }
    host_waits(all, "synchronize");
  }

  void record(void** event, const c10::Stream& on, const Index, const c10::EventFlag) const override {
    Lock lock(clocks().mutex);
    static size_t made = 0;
    if (!*event) *event = new Event{{}, ++made};
    auto& recorded = *static_cast<Event*>(*event);
    Agent agent = clocks().agent(on);
    recorded.clock = clocks().launching(agent);
    if (rehearses()) ask_for({.what = "record", .agent = agent, .other = recorded.number});
  }
  void block(void* event, const c10::Stream& waiting) const override {
    if (!event || !is_ordered("wait")) return;
    Lock lock(clocks().mutex);
    auto& recorded = *static_cast<Event*>(event);
    Agent agent = clocks().agent(waiting);
    clocks().of[agent].join(recorded.clock);
    if (rehearses()) ask_for({.what = "wait", .agent = agent, .other = recorded.number});
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    if (event && is_ordered("host's wait")) host_waits(static_cast<Event*>(event)->clock, "event.synchronize");
  }
  double elapsedTime(void*, void*, const Index) const override { return 1.0; }  // milliseconds, between any two
  void destroyEvent(void* event, const Index) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override {
    record_on(data.get(), on);
  }

 private:
  static int index(c10::Device device) { return device.has_index() ? device.index() : current().device; }
  static c10::Stream stream(c10::Device device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, device_at(index(device)), id);
  }
  static Clock known_to(const c10::Stream& of) {
    Lock lock(clocks().mutex);
    return clocks().launching(clocks().agent(of));
  }
};

}  // namespace emulated
