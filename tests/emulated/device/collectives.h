// Collectives: what NCCL's process group does with streams, over gloo.
// In a rehearsal there is one rank, and for the CPU's tensors, which are control messages, every other one has what it
// has; those of the device go to nobody.
//
// A collective that is asked for with async_op runs on a stream of the group's own, which first waits for the caller's;
// Work.wait() has the caller's stream wait for it, and the host for nothing. Until then the group holds the tensors. One
// without async_op runs on the caller's stream. Ranks tell each other what they are about to do, on whichever of their
// groups: where they differ NCCL's streams would hang, or add up different tensors, while hosts go on (and may hang too
// where only the groups are in another order). Here that is reported, and gives NaN. An address that is no multiple of 16 bytes takes NCCL's slow path, and is
// reported. Sums are taken hop by hop in the tensors' dtype, as NCCL's ring rounds them.
#pragma once

#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "kernels.h"

namespace emulated {

using Tensors = std::vector<Tensor>;

// A collective as the tests look at it.
struct Issued {
  std::string operation, line;
  size_t bytes;
  Agent agent;
  Ticks when;
  Clock known;  // when it began
};

inline std::vector<Issued>& issued() {
  static auto* made = new std::vector<Issued>;
  return *made;
}

class Underway final : public c10d::Work {
 public:
  Underway(c10d::OpType type, std::string operation, int device, Clock done, size_t place, Tensors held,
           Tensors results)
      : Work(-1, type),
        operation_(std::move(operation)),
        device_(device),
        done_(std::move(done)),
        place_(place),
        held_(std::move(held)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{device_at(device)});
    future_->markCompleted(c10::IValue(results));  // by an event of the stream that is current
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  void synchronize() override {
    if (!is_ordered("wait for " + operation_)) return;
    Lock lock(clocks().mutex);
    clocks().of[current_agent(device_)].join(done_);
    if (rehearses()) ask_for({.what = "wait for collective", .agent = current_agent(device_), .other = place_});
    held_.clear();
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  std::string operation_;
  int device_;
  Clock done_;
  size_t place_;  // in a rehearsal
  Tensors held_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// What is done when it is returned.
class Done final : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
};

class Group final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  Group(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, int number, std::chrono::milliseconds limit)
      : Backend(rank, size),
        gloo_(std::move(gloo)),
        number_(number),
        options_(c10::make_intrusive<c10d::Backend::Options>("emunccl", limit)) {}

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(out.numel() == in.numel() * size_ && out.scalar_type() == in.scalar_type(),
                "output tensor size must be equal to world_size times input tensor size");
    return issue("all_gather", c10d::OpType::_ALLGATHER_BASE, options.asyncOp, {in}, {out}, [&] {
      on_cpu(out).view(-1).copy_(at::cat(everyones(on_cpu(in).view(-1), "all_gather")));
    });
  }
  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& options) override {
    return issue("all_gather", c10d::OpType::ALLGATHER, options.asyncOp, ins, outs[0], [&] {
      if (!alike(outs[0])) {  // then NCCL's group broadcasts from each rank
        for (int rank = 0; rank < size_; ++rank) {
          Tensor out = on_cpu(outs[0][rank]);
          if (out.numel()) out.copy_(everyones(rank == rank_ ? on_cpu(ins[0]) : out, "broadcast of a list")[rank]);
        }
        return;
      }
      auto parts = everyones(on_cpu(ins[0]), "all_gather of a list");
      for (int rank = 0; rank < size_; ++rank) on_cpu(outs[0][rank]).copy_(parts[rank].view_as(outs[0][rank]));
    });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& options) override {
    return issue("all_gather", c10d::OpType::COALESCED, options.asyncOp, ins, outs, [&] {
      for (size_t i = 0; i < ins.size(); ++i)
        on_cpu(outs[i]).view(-1).copy_(at::cat(everyones(on_cpu(ins[i]).view(-1), "all_gather")));
    });
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(in.numel() == out.numel() * size_ && out.scalar_type() == in.scalar_type(),
                "input tensor must be the same size as output size times world size");
    return issue("reduce_scatter", c10d::OpType::_REDUCE_SCATTER_BASE, options.asyncOp, {in}, {out}, [&] {
      auto parts = everyones(on_cpu(in).view(-1), "reduce_scatter");
      for (auto& part : parts) part = part.chunk(size_)[rank_];
      on_cpu(out).view(-1).copy_(reduced(parts, options.reduceOp));
    });
  }
  WorkPtr reduce_scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ReduceScatterOptions& options) override {
    return issue("reduce_scatter", c10d::OpType::REDUCE_SCATTER, options.asyncOp, ins[0], outs, [&] {
      for (int rank = 0; rank < size_; ++rank) {  // as NCCL's group does where parts differ: reduces to each rank
        if (!ins[0][rank].numel()) continue;
        auto parts = everyones(on_cpu(ins[0][rank]), "reduce of a list");
        if (rank == rank_) on_cpu(outs[0]).copy_(reduced(parts, options.reduceOp));
      }
    });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins,
                                          const c10d::ReduceScatterOptions& options) override {
    return issue("reduce_scatter", c10d::OpType::COALESCED, options.asyncOp, ins, outs, [&] {
      for (size_t i = 0; i < ins.size(); ++i) {
        auto parts = everyones(on_cpu(ins[i]).view(-1), "reduce_scatter");
        for (auto& part : parts) part = part.chunk(size_)[rank_];
        on_cpu(outs[i]).view(-1).copy_(reduced(parts, options.reduceOp));
      }
    });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return issue("all_reduce", c10d::OpType::ALLREDUCE, options.asyncOp, tensors, tensors, [&] {
      for (auto& tensor : tensors) {
        Tensor own = on_cpu(tensor);
        own.copy_(reduced(everyones(own, "all_reduce"), options.reduceOp));
      }
    });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return issue("broadcast", c10d::OpType::BROADCAST, options.asyncOp, tensors, tensors, [&] {
      for (auto& tensor : tensors) {
        Tensor own = on_cpu(tensor);
        own.copy_(everyones(own, "broadcast")[options.rootRank]);
      }
    });
  }
  WorkPtr scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& options) override {
    Tensors parts = ins.empty() ? Tensors{} : ins[0];
    return issue("scatter", c10d::OpType::SCATTER, options.asyncOp, parts, outs, [&] {
      Tensor own = on_cpu(outs[0]);
      Tensors mine;
      for (auto& part : parts) mine.push_back(on_cpu(part).reshape(-1));
      Tensor all = mine.empty() ? at::zeros({own.numel() * size_}, own.options()) : at::cat(mine);
      own.copy_(everyones(all, "scatter")[options.rootRank].chunk(size_)[rank_].view_as(own));
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    Tensors one{at::zeros({1}, at::TensorOptions().device(device_at(current().device)))};
    auto work = allreduce(one, {});
    work->wait();
    c10::Device device = device_at(current().device);
    Streams().synchronizeStream(Streams().getStream(device));
    return work;
  }

 private:
  struct Unlike {};

  static bool alike(const Tensors& tensors) {
    return std::all_of(tensors.begin(), tensors.end(),
                       [&](const Tensor& one) { return one.numel() == tensors[0].numel(); });
  }

  // Every rank's tensor. Throws `Unlike` where a rank is about to do something else.
  Tensors everyones(const Tensor& own, const std::string& operation) {
    at::AutoDispatchBelowAutograd below;
    auto text = "group " + std::to_string(number_) + ": " + operation + " of " + std::to_string(own.nbytes()) + " bytes of " + toString(own.scalar_type());
    if (rehearses()) return Tensors(size_, own);
    auto head = at::full({1}, static_cast<int64_t>(std::hash<std::string>{}(text)), at::kLong);
    for (auto& other : exchange(head))
      if (!other.equal(head)) throw Unlike();
    return exchange(own.contiguous());
  }
  Tensors exchange(Tensor own) {
    Tensors in{own};
    std::vector<Tensors> out(1);
    for (int rank = 0; rank < size_; ++rank) out[0].push_back(at::empty_like(own));
    gloo_->allgather(out, in)->wait();
    return out[0];
  }
  // NCCL's AVG divides each term before it is added.
  Tensor reduced(const Tensors& parts, const c10d::ReduceOp& operation) {
    at::AutoDispatchBelowAutograd below;
    const bool average = operation == c10d::ReduceOp::AVG;
    TORCH_CHECK(!average || at::isFloatingType(parts[0].scalar_type()), "Cannot use ReduceOp.AVG with integral inputs");
    auto term = [&](const Tensor& part) { return average ? part.mul(1.0 / size_) : part; };
    Tensor total = term(parts[0]).clone();
    for (int rank = 1; rank < size_; ++rank) {
      if (operation == c10d::ReduceOp::MAX)
        total = at::maximum(total, parts[rank]);
      else if (operation == c10d::ReduceOp::MIN)
        total = at::minimum(total, parts[rank]);
      else if (operation == c10d::ReduceOp::PRODUCT)
        total = total.mul(parts[rank]);
      else
        total = total.add(term(parts[rank]));
    }
    return total;
  }

  WorkPtr issue(const std::string& operation, c10d::OpType type, bool async, const Tensors& ins, const Tensors& outs,
                const std::function<void()>& act) {
    Tensors all(ins);
    all.insert(all.end(), outs.begin(), outs.end());
    if (rehearses() && !is_ours(all.at(0))) {
      act();
      return c10::make_intrusive<Done>();
    }
    for (auto& tensor : all) {
      TORCH_CHECK(is_ours(tensor), "No backend type associated with device type ", tensor.device());
      TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
    }
    const int device = all[0].device().index();
    const Agent caller = current_agent(device), agent = async ? own_stream(device, caller) : caller;
    Launch kernel(operation, agent);
    size_t bytes = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      const Tensor& tensor = all[i];
      bool again = std::any_of(all.begin(), all.begin() + i, [&](const Tensor& other) { return other.is_same(tensor); });
      if (again) continue;
      bytes += tensor.nbytes();
      if (!rehearses() && tensor.nbytes() >= kShort && reinterpret_cast<uintptr_t>(Launch::bytes_of(tensor).first) % kAlignment)
        report("alignment: " + kernel.name() + " is given an address that is no multiple of 16 bytes");
    }
    for (auto& tensor : ins) kernel.reads(tensor);
    for (auto& tensor : outs) kernel.writes(tensor);
    if (rehearses()) write_down(kernel.place(), caller, ins, outs);
    Clock done;
    {
      Lock lock(clocks().mutex);
      done = clocks().of[agent];
      issued().push_back({operation, kernel.name(), bytes, agent, kernel.when(), done});
    }
    if (!rehearses()) {
      std::optional<py::gil_scoped_release> others_may_run;
      if (PyGILState_Check()) others_may_run.emplace();
      try {
        act();
      } catch (Unlike&) {
        report("unlike: ranks come to different collectives, this one to " + kernel.name());
        for (auto& tensor : outs)
          if (tensor.is_floating_point()) on_cpu(tensor).fill_(NAN);
      }
    }
    if (!async) all.clear();
    c10::Stream caller_stream = Streams().getStream(device_at(device));
    if (async) Streams().exchangeStream(streams_.at(device));
    auto work = c10::make_intrusive<Underway>(type, operation, device, std::move(done), kernel.place(), std::move(all), outs);
    Streams().exchangeStream(caller_stream);
    return work;
  }
  void write_down(size_t place, Agent caller, const Tensors& ins, const Tensors& outs) {
    size_t into = 0, out_of = 0;
    for (auto& tensor : ins) into += tensor.nbytes();
    for (auto& tensor : outs) out_of += tensor.nbytes();
    Lock lock(clocks().mutex);
    auto& asked = rehearsal().asked.at(place);
    asked.what = "collective";
    asked.other = caller;
    asked.group = id_;
    asked.bytes = std::max(into, out_of);  // of what is whole
  }
  static size_t next_id() {
    static size_t made = 0;
    return ++made;
  }
  Agent own_stream(int device, Agent caller) {
    Lock lock(clocks().mutex);
    auto found = streams_.find(device);
    if (found == streams_.end()) found = streams_.emplace(device, Streams().getNewStream(device_at(device))).first;
    Agent own = clocks().agent(found->second);
    Clock ready = clocks().launching(caller);
    if (!journal().disregards_all) clocks().of[own].join(ready);
    return own;
  }

  static constexpr size_t kAlignment = 16, kShort = 64;  // bytes; what is shorter has no fast path to lose
  c10::intrusive_ptr<c10d::Backend> gloo_;
  int number_;  // among the groups of the same ranks
  size_t id_ = next_id();
  c10::intrusive_ptr<c10d::Backend::Options> options_;
  std::map<int, c10::Stream> streams_;
};

}  // namespace emulated
