// Kernels: every operation of PyTorch on tensors of the device, run by the CPU's kernel on the same memory, at launch.
//
// What an operation reads and writes is told by its schema. Views, empty tensors and the few operations that CUDA has of
// its own (copies, item) are written out; all others come to `run`.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "streams.h"

namespace emulated {

using at::Tensor;

inline bool is_ours(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

// The same elements as a tensor of the CPU (or of the device again), over the same memory.
inline Tensor alias(const Tensor& tensor, c10::DispatchKey key) {
  auto* inside = tensor.storage().unsafeGetStorageImpl();
  TORCH_CHECK(!tensor.numel() || inside->data(), "a kernel was given a tensor whose memory has been given back");
  c10::Storage storage = tensor.storage();
  if (key == c10::DispatchKey::CPU)  // a kernel that resizes its output gets other memory for it
    storage = c10::Storage(c10::Storage::use_byte_size_t(), inside->nbytes(),
                           at::DataPtr(const_cast<void*>(inside->data()), c10::Device(c10::kCPU)),
                           c10::GetAllocator(c10::kCPU), true);
  if (key == c10::DispatchKey::Meta)
    storage = c10::Storage(c10::Storage::use_byte_size_t(), inside->nbytes(),
                           at::DataPtr(nullptr, c10::Device(c10::kMeta)), c10::GetAllocator(c10::kMeta), true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}
inline Tensor on_cpu(const Tensor& tensor) { return alias(tensor, c10::DispatchKey::CPU); }
// A tensor that stands for it in a rehearsal, where shapes alone are asked for.
inline Tensor on_meta(const Tensor& tensor) { return alias(tensor, c10::DispatchKey::Meta); }

// One kernel, on the stream of `agent`.
class Launch {
 public:
  Launch(const std::string& operation, Agent agent)
      : agent_(agent), operation_(operation), name_(rehearses() ? operation : operation + " at " + where()) {
    if (rehearses()) place_ = ask_for({.what = "kernel", .name = operation, .agent = agent, .ours = runs_sharding()});
    Lock lock(clocks().mutex);
    when_ = clocks().launching(agent).tick(agent);
    ++running();
  }
  Launch(const std::string& operation, int device) : Launch(operation, current_agent(device)) {}
  Launch(const Launch&) = delete;
  ~Launch() { --running(); }
  // Whether this thread is inside of a kernel, whose CPU's operations are the device's.
  static bool is_running() { return running() > 0; }

  void reads(const Tensor& tensor) { touch(tensor, false); }
  void writes(const Tensor& tensor) { touch(tensor, true); }
  const std::string& name() const { return name_; }
  Ticks when() const { return when_; }
  // Where a rehearsal has written it down.
  size_t place() const { return place_; }
  // The host waits for the kernel.
  void wait() {
    Clock known;
    {
      Lock lock(clocks().mutex);
      known = clocks().of[agent_];
    }
    host_waits(known, operation_);
  }

  static std::pair<const char*, size_t> bytes_of(const Tensor& tensor) {
    int64_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
    auto* start = static_cast<const char*>(tensor.storage().data()) + tensor.storage_offset() * tensor.itemsize();
    return {start, (last + 1) * tensor.itemsize()};
  }

 private:
  static int& running() {
    thread_local int kernels = 0;
    return kernels;
  }
  void touch(const Tensor& tensor, bool writes) {
    if (!tensor.numel()) return;
    if (rehearses()) {
      Lock lock(clocks().mutex);
      auto& asked = rehearsal().asked.at(place_);
      asked.bytes += tensor.nbytes();
      asked.shapes.push_back(tensor.sizes().vec());
      return;
    }
    auto [address, bytes] = bytes_of(tensor);
    Lock lock(clocks().mutex);
    if (Block* block = memory().find(address)) {
      size_t begin = address - block->memory;
      block->add({begin, begin + bytes, agent_, when_, writes, name_});
    }
  }

  Agent agent_;
  Ticks when_;
  size_t place_ = 0;
  std::string operation_, name_;
};

// --- operations of the device's own

inline c10::Device device_or_current(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : device_at(current().device);
}

inline Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(size, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, &device_memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

inline const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* inside = self.unsafeGetTensorImpl();
  if (inside->sizes() == size) return self;
  inside->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) inside->empty_tensor_restride(*format);
  size_t bytes = at::detail::computeStorageNbytes(inside->sizes(), inside->strides(), self.itemsize(),
                                                  self.storage_offset());
  if (bytes > self.storage().nbytes()) resize(self.storage(), bytes);
  return self;
}

inline Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                           at::IntArrayRef stride) {
  auto* inside = self.unsafeGetTensorImpl();
  inside->set_storage_keep_dtype(std::move(storage));
  inside->set_storage_offset(offset);
  if (stride.size() == size.size())
    inside->set_sizes_and_strides(size, stride);
  else
    inside->set_sizes_contiguous(size);
  return self;
}

inline Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  int64_t elements = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {elements}, {});
}

inline Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

inline bool is_pinned(const Tensor& tensor) {
  Lock lock(clocks().mutex);
  Block* block = memory().find(tensor.storage().data());
  return block && block->pinned;
}

// As CUDA: the host waits for copies between it and the device, unless its memory is pinned and it asked not to.
inline Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  bool crosses = is_ours(from) != is_ours(to);
  const char* operation = !crosses ? "copy_" : is_ours(to) ? "copy to the device" : "copy to the host";
  Launch kernel(operation, (is_ours(to) ? to : from).device().index());
  kernel.reads(from);
  kernel.writes(to);
  if (!rehearses()) {
    at::AutoDispatchBelowAutograd below;
    Tensor target = is_ours(to) ? on_cpu(to) : to;
    target.copy_(is_ours(from) ? on_cpu(from) : from);
  }
  if (crosses && !(non_blocking && is_pinned(is_ours(to) ? from : to))) kernel.wait();
  return to;
}

inline at::Scalar item(const Tensor& self) {
  Launch kernel("item", self.device().index());
  kernel.reads(self);
  kernel.wait();
  return on_cpu(self).item();
}

inline void record_stream(Tensor& self, c10::Stream stream) {
  record_on(self.storage().data(), stream);
}

// Plain attention, as the CPU's kernels have it.
inline int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                                std::optional<double>, bool) {
  // A rehearsal has the kernel that keeps no scores, as GPUs have.
  return rehearses() ? static_cast<int64_t>(sdp::SDPBackend::flash_attention)
                     : static_cast<int64_t>(sdp::SDPBackend::math);
}

// --- all others

// The size of what these return depends on values, for which CUDA's kernels have the host wait.
inline const std::set<std::string>& waiting_operations() {
  static const std::set<std::string> names{
      "aten::nonzero",      "aten::masked_select", "aten::_unique2",  "aten::unique_dim",
      "aten::unique_consecutive", "aten::equal",   "aten::is_nonzero", "aten::bincount",
      "aten::repeat_interleave"};
  return names;
}

// The tensors of one call: each of the device's, and the tensor of the CPU (or meta) that stands for it.
class Call {
 public:
  Tensor enter(const Tensor& tensor, bool writes, const std::string& operation) {
    if (!is_ours(tensor)) return tensor;
    if (device_ < 0) device_ = tensor.device().index();
    TORCH_CHECK(device_ == tensor.device().index(), "tensors of several devices in ", operation);
    arguments_.push_back({tensor, rehearses() ? on_meta(tensor) : on_cpu(tensor), writes});
    return arguments_.back().stand_in;
  }
  void made_on(int device) { device_ = device; }
  int device() const { return device_ < 0 ? current().device : device_; }

  void record(Launch& kernel) const {
    for (auto& argument : arguments_) argument.writes ? kernel.writes(argument.own) : kernel.reads(argument.own);
  }
  // An argument that the operation gave another size takes it over.
  void take_over_sizes(Launch& kernel) const {
    for (auto& argument : arguments_)
      if (argument.writes && argument.own.sizes() != argument.stand_in.sizes()) {
        resize_(argument.own, argument.stand_in.sizes(), std::nullopt);
        if (!rehearses()) on_cpu(argument.own).copy_(argument.stand_in);
        kernel.writes(argument.own);
      }
  }
  Tensor leave(const Tensor& result, Launch& kernel) const {
    if (!result.defined()) return result;
    for (auto& argument : arguments_)
      if (argument.stand_in.is_same(result)) return argument.own;
    for (auto& argument : arguments_)
      if (result.has_storage() && shares(argument.stand_in.storage(), result.storage())) {
        Tensor view = alias(argument.own, c10::DispatchKey::PrivateUse1);
        view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
        return view;
      }
    Tensor made = empty_strided(result.sizes(), result.strides(), result.scalar_type(), {}, device_at(device()), {});
    if (!rehearses()) on_cpu(made).copy_(result);
    kernel.writes(made);
    return made;
  }

 private:
  static bool shares(const c10::Storage& one, const c10::Storage& other) {
    if (rehearses()) return one.unsafeGetStorageImpl() == other.unsafeGetStorageImpl();
    return other.data() && one.data() == other.data();
  }
  struct Argument {
    Tensor own, stand_in;
    bool writes;
  };
  std::vector<Argument> arguments_;
  int device_ = -1;
};

inline void run(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  const auto& name = schema.name();
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  Call call;
  for (size_t i = 0; i < count; ++i) {
    c10::IValue& value = (*stack)[first + i];
    auto* info = schema.arguments()[i].alias_info();
    const bool writes = info && info->isWrite();
    if (value.isTensor()) {
      value = call.enter(value.toTensor(), writes, name);
    } else if (value.isTensorList()) {
      c10::List<Tensor> entered;
      for (Tensor tensor : value.toTensorList()) entered.push_back(call.enter(tensor, writes, name));
      value = entered;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> entered;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList())
        entered.push_back(tensor ? std::optional(call.enter(*tensor, writes, name)) : tensor);
      value = entered;
    } else if (value.isDevice() && value.toDevice().type() == kDevice) {
      call.made_on(device_or_current(value.toDevice()).index());
      value = c10::Device(rehearses() ? c10::kMeta : c10::kCPU);
    }
  }
  Launch kernel(name, call.device());
  call.record(kernel);
  at::AutoDispatchBelowAutograd below;
  operation.callBoxed(stack);
  call.take_over_sizes(kernel);
  const size_t results = schema.returns().size(), start = stack->size() - results;
  for (size_t i = 0; i < results; ++i) {
    c10::IValue& value = (*stack)[start + i];
    if (value.isTensor()) {
      value = call.leave(value.toTensor(), kernel);
    } else if (value.isTensorList()) {
      c10::List<Tensor> left;
      for (Tensor tensor : value.toTensorList()) left.push_back(call.leave(tensor, kernel));
      value = left;
    }
  }
  if (waiting_operations().count(name)) kernel.wait();
}

}  // namespace emulated
