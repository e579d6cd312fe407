// The device as a Python module: what it registers with torch, and what tests ask it.
#include "collectives.h"
#include "host.h"

namespace emulated {

REGISTER_ALLOCATOR(kDevice, &device_memory());
C10_REGISTER_GUARD_IMPL(PrivateUse1, Streams);

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("_copy_from", &copy_from);
  library.impl("_local_scalar_dense", &item);
  library.impl("record_stream", &record_stream);
}

}  // namespace emulated

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &emulated::choose_attention)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace emulated;
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  module.def("set_up", [](int devices, py::object where, py::object origin) {
    clocks().devices = devices;
    journal().where = std::move(where);
    journal().origin = std::move(origin);
    at::addGlobalCallback(
        at::RecordFunctionCallback(&observe).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  });
  module.def("close", [] {
    journal().closing = true;
    journal().where = journal().origin = rehearsal().is_sharding = py::object();
  });
  module.def("set_device", [](int device) { current().device = device; });
  module.def("current_device", [] { return current().device; });
  module.def("memory", [] {
    Lock lock(clocks().mutex);
    return std::make_pair(memory().allocated, memory().peak);
  });
  module.def("reset_peak", [] { device_memory().resetPeakStats(0); });

  module.def("reports", [] {
    Lock lock(clocks().mutex);
    return journal().reports;
  });
  module.def("host_waits", [] {
    Lock lock(clocks().mutex);
    return journal().host_waits;
  });
  module.def("orderings", [] {
    Lock lock(clocks().mutex);
    return journal().orderings;
  });
  module.def("collectives", [] {  // (operation, line, bytes, places of the earlier ones that it comes after)
    Lock lock(clocks().mutex);
    std::vector<std::tuple<std::string, std::string, size_t, std::vector<size_t>>> found;
    for (size_t i = 0; i < issued().size(); ++i) {
      std::vector<size_t> after;
      for (size_t j = 0; j < i; ++j)
        if (issued()[i].known.of(issued()[j].agent) >= issued()[j].when) after.push_back(j);
      found.emplace_back(issued()[i].operation, issued()[i].line, issued()[i].bytes, after);
    }
    return found;
  });
  module.def("rehearse", [](py::object is_sharding) {
    rehearsal().is_sharding = std::move(is_sharding);
    rehearsal().on = journal().is_silent = true;
  });
  module.def("mark", [](std::string name) {
    ask_for({.what = "mark", .name = std::move(name), .agent = current_agent(current().device)});
  });
  module.def("asked", [] {
    Lock lock(clocks().mutex);
    std::vector<std::tuple<std::string, std::string, size_t, size_t, size_t, size_t, bool, std::vector<std::vector<int64_t>>>>
        found;
    for (auto& one : rehearsal().asked)
      found.emplace_back(one.what, one.name, one.agent, one.other, one.group, one.bytes, one.ours, one.shapes);
    return found;
  });
  module.def("forget_asked", [] {
    Lock lock(clocks().mutex);
    rehearsal().asked.clear();
  });
  module.def("clear", [] {
    Lock lock(clocks().mutex);
    journal().reports.clear();
    journal().host_waits.clear();
    issued().clear();
  });
  module.def("disregard", [](std::set<std::string> orderings) { journal().disregarded = std::move(orderings); });
  module.def("disregard_all", [](bool all) { journal().disregards_all = all; });
  py::class_<Group, c10::intrusive_ptr<Group>, c10d::Backend>(module, "Group")
      .def_property_readonly("options", &Group::getBackendOptions);
  module.def("make_group", [](c10::intrusive_ptr<c10d::Backend> gloo /* None in a rehearsal */, int rank, int size, int number, double seconds) {
    std::chrono::milliseconds limit(static_cast<int64_t>(1000 * seconds));
    return c10::make_intrusive<Group>(std::move(gloo), rank, size, number, limit);
  });
}
