// The host's own accesses to pinned memory, from and to which a device copies meanwhile.
//
// The CPU's kernels know nothing of this device. torch tells an observer of each operation before it runs, and so what
// it is going to read and write; views read nothing. What other code does with the memory (NumPy, files) is not seen.
#pragma once

#include <ATen/record_function.h>

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels.h"

namespace emulated {

// They look at a tensor and not at what it holds.
inline bool only_looks(std::string_view name) {
  constexpr std::array<std::string_view, 12> kBegin{
      "aten::empty",      "aten::new_", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::is_",
      "aten::pin_memory", "aten::_pin", "aten::resize_",    "aten::set_",      "aten::result_",   "aten::record_"};
  for (auto begin : kBegin)
    if (name.substr(0, begin.size()) == begin) return true;
  return false;
}

inline void touch_by_host(const Tensor& tensor, bool writes, const std::string& name) {
  auto [address, bytes] = Launch::bytes_of(tensor);
  {
    Lock lock(clocks().mutex);
    Block* block = memory().find(address);
    if (!block || !block->pinned) return;
  }
  auto by = name + " at " + where();
  Lock lock(clocks().mutex);
  if (Block* block = memory().find(address)) {
    size_t begin = address - block->memory;
    block->add({begin, begin + bytes, kHost, clocks().of[kHost].tick(kHost), writes, by});
  }
}

inline std::unique_ptr<at::ObserverContext> observe(const at::RecordFunction& operation) {
  auto schema = operation.operator_schema();
  if (!schema || Launch::is_running() || journal().closing || only_looks(operation.name())) return nullptr;
  auto inputs = operation.inputs();
  std::vector<std::pair<Tensor, bool>> found;  // unless the device has a part in it, whose kernels tell themselves
  for (size_t i = 0; i < inputs.size() && i < schema->arguments().size(); ++i) {
    auto* info = schema->arguments()[i].alias_info();
    if (info && !info->isWrite()) continue;  // what is returned is a view of it
    const bool writes = info != nullptr;
    if (inputs[i].isDevice() && inputs[i].toDevice().type() == kDevice) return nullptr;
    if (inputs[i].isTensor())
      found.emplace_back(inputs[i].toTensor(), writes);
    else if (inputs[i].isTensorList())
      for (const Tensor& tensor : inputs[i].toTensorVector()) found.emplace_back(tensor, writes);
  }
  for (auto& [tensor, _] : found)
    if (is_ours(tensor)) return nullptr;
  for (auto& [tensor, writes] : found)
    if (tensor.defined() && tensor.has_storage() && tensor.numel() && tensor.device().is_cpu() && tensor.storage().data())
      touch_by_host(tensor, writes, operation.name());
  return nullptr;
}

}  // namespace emulated
