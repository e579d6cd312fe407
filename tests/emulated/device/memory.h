// Memory: the device's allocator, which caches per stream as CUDA's does, and that of pinned host memory.
//
// A tensor's memory returns to the pool of the stream on which it was made, and the next tensor made there may get it at
// once: right for that stream, too early for any other that still uses it and was not named by record_stream. Here every
// tensor has memory of its own, full of NaN; that a pool might have handed it out again is judged by the clocks.
#pragma once

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "accesses.h"
#include "rehearsal.h"

namespace emulated {

struct Memory {
  std::map<char*, Block> blocks;
  std::map<Agent, std::vector<Access>> left;  // by pool: accesses that may not have ended when their memory returned
  size_t allocated = 0, peak = 0;             // bytes of the device

  Block* find(const void* address) {
    auto after = blocks.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (after == blocks.begin()) return nullptr;
    Block& block = std::prev(after)->second;
    return static_cast<const char*>(address) < block.memory + block.bytes ? &block : nullptr;
  }
};

inline Memory& memory() {
  static Memory* made = new Memory;
  return *made;
}

inline void* acquire(size_t bytes, int device, bool pinned) {
  if (!bytes) return nullptr;
  auto line = rehearses() ? "" : where();
  void* address = nullptr;
  if (rehearses()) {
    address = reserve(bytes);
  } else {
    if (posix_memalign(&address, 512, bytes)) throw std::bad_alloc();
    std::memset(address, 0xFF, bytes);  // NaN in every floating-point dtype
  }
  Lock lock(clocks().mutex);
  Agent pool = pinned ? kHost : clocks().agent(device, current().stream(device));
  Block block{static_cast<char*>(address), bytes, device, pool, pinned, line, {}, {}, {}};
  if (!pinned) {
    auto& left = memory().left[pool];
    std::erase_if(left, [&](const Access& access) {
      return std::max(clocks().of[kHost].of(access.agent), clocks().of[pool].of(access.agent)) >= access.when;
    });
    block.before_reuse = left;
    memory().allocated += bytes;
    memory().peak = std::max(memory().peak, memory().allocated);
    if (rehearses()) ask_for({.what = "allocate", .agent = pool, .bytes = bytes});
  }
  memory().blocks.emplace(block.memory, std::move(block));
  return address;
}

inline void give_back(void* address) {
  if (!address || journal().closing) return;
  std::vector<Access> running;
  Agent pool = kHost;
  size_t bytes = 0;
  {
    Lock lock(clocks().mutex);
    auto found = memory().blocks.find(static_cast<char*>(address));
    if (found == memory().blocks.end()) return;
    Block block = std::move(found->second);
    memory().blocks.erase(found);
    bytes = block.bytes;
    if (!block.pinned) {
      memory().allocated -= block.bytes;
      pool = block.pool;
      if (rehearses()) ask_for({.what = "free", .agent = pool, .bytes = block.bytes});
      Clock known = clocks().of[kHost];
      known.join(clocks().of[pool]);
      for (auto& access : block.accesses)
        if (access.agent != pool && !block.recorded.count(access.agent) && known.of(access.agent) < access.when) {
          access.by = access.describe() + " may not have ended (made at " + block.made_at;
          running.push_back(std::move(access));
        }
    }
  }
  rehearses() ? static_cast<void>(munmap(address, bytes)) : free(address);
  if (running.empty()) return;
  auto line = where();
  Lock lock(clocks().mutex);
  for (auto& access : running) {
    access.by += ", freed at " + line + " without record_stream)";
    memory().left[pool].push_back(std::move(access));
  }
}

inline void record_on(const void* address, const c10::Stream& stream) {
  if (!is_ordered("record_stream")) return;
  Lock lock(clocks().mutex);
  if (Block* block = memory().find(address)) block->recorded.insert(clocks().agent(stream));
}

struct DeviceMemory final : c10::DeviceAllocator {
  at::DataPtr allocate(size_t bytes) override {
    int device = current().device;
    void* address = acquire(bytes, device, false);
    return {address, address, &give_back, device_at(device)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const at::DataPtr& data, c10::Stream stream) override { record_on(data.get(), stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { memory().peak = memory().allocated; }
};

struct PinnedMemory final : c10::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* address = acquire(bytes, 0, true);
    return {address, address, &give_back, c10::Device(c10::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

inline DeviceMemory& device_memory() {
  static DeviceMemory* made = new DeviceMemory;
  return *made;
}

inline PinnedMemory& pinned_memory() {
  static PinnedMemory* made = new PinnedMemory;
  return *made;
}

inline void resize(const c10::Storage& storage, size_t bytes) {
  auto* inside = storage.unsafeGetStorageImpl();
  int device = inside->device().index();
  void* address = acquire(bytes, device, false);
  if (bytes && inside->data() && !rehearses()) std::memcpy(address, inside->data(), std::min(bytes, inside->nbytes()));
  inside->set_data_ptr_noswap(at::DataPtr(address, address, &give_back, device_at(device)));
  inside->set_nbytes(bytes);
}

// What torch asks a device about.
struct Hooks final : at::PrivateUse1HooksInterface {
  using Index = c10::DeviceIndex;
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(Index) const override { return true; }
  Index deviceCount() const override { return static_cast<Index>(clocks().devices); }
  void setCurrentDevice(Index device) const override { current().device = device; }
  Index getCurrentDevice() const override { return static_cast<Index>(current().device); }
  Index exchangeDevice(Index device) const override {
    return static_cast<Index>(std::exchange(current().device, static_cast<int>(device)));
  }
  Index maybeExchangeDevice(Index device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* address) const override {
    Lock lock(clocks().mutex);
    Block* block = memory().find(address);
    return block && block->pinned;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  // Kernels are the CPU's, and so are their random numbers.
  const at::Generator& getDefaultGenerator(Index) const override {
    return at::globalContext().defaultGenerator(c10::Device(c10::kCPU));
  }
  at::Generator getNewGenerator(Index) const override { return getDefaultGenerator(0).clone(); }
  at::Device getDeviceFromPtr(void* address) const override {
    Lock lock(clocks().mutex);
    Block* block = memory().find(address);
    return device_at(block ? block->device : 0);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize(storage, bytes); }
};

}  // namespace emulated
