"""Private torch names that onecopy uses, each with where. A failure here says what moved in the installed torch."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from ranks import run_ranks


def test_disabled_torch_function_impl_for_sliced_tensors() -> None:
    """sharding/tensor/sliced.py, sharding/tensor/norms.py and sharding/tensor/recorded.py; read in torch 2.13."""
    assert hasattr(torch._C, "_disabled_torch_function_impl"), f"moved in torch {torch.__version__}"


def test_a_module_that_is_compiled_in_place_is_known() -> None:
    """activations/checkpoint.py; read in torch 2.13."""
    assert torch.nn.Linear(1, 1)._compiled_call_impl is None, f"moved in torch {torch.__version__}"


def test_make_wrapper_subclass_keeps_shape_strides_and_dtype() -> None:
    """sharding/tensor/sliced.py; read in torch 2.13."""

    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise NotImplementedError(func)

    made = torch.Tensor._make_wrapper_subclass(Wrapper, torch.Size([3, 2]), strides=(1, 3), dtype=torch.bfloat16)
    assert (tuple(made.shape), made.stride(), made.dtype) == ((3, 2), (1, 3), torch.bfloat16)
    assert isinstance(made, Wrapper)


def _backend_name(rank: int) -> str:
    group = torch.distributed.group.WORLD
    assert group is not None
    return group._get_backend(torch.device("cpu")).name()


def test_backend_of_a_group_has_a_name() -> None:
    """comm/backends.py; read in torch 2.13."""
    assert run_ranks(2, _backend_name) == ["gloo", "gloo"]


def _group_limit(rank: int) -> float:
    group = torch.distributed.group.WORLD
    assert group is not None
    return group._get_backend(group._device_types[0]).options._timeout.total_seconds()


def test_backend_of_a_group_tells_its_time_limit() -> None:
    """comm/backends.py; read in torch 2.13."""
    assert run_ranks(2, _group_limit, group_timeout=17) == [17.0, 17.0]


def test_current_graph_task_id_tells_backward_from_the_rest() -> None:
    """sharding/graph/boundary.py; read in torch 2.13."""
    seen: list[int] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(torch._C._current_graph_task_id()))
    assert torch._C._current_graph_task_id() == -1
    x.sum().backward()
    assert seen[0] != -1
    assert torch._C._current_graph_task_id() == -1


def test_checkpointable_protocol_is_what_sliced_tensors_implement() -> None:
    """sharding/tensor/checkpointable.py; read in torch 2.13."""
    from torch.distributed._checkpointable import _Checkpointable

    from onecopy.sharding.tensor.sliced import SlicedTensor

    methods = {name for name in vars(_Checkpointable) if name.startswith("__") and name in vars(SlicedTensor)}
    assert methods >= {"__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"}


def test_file_system_of_checkpoints_can_be_replaced(tmp_path: Path) -> None:
    """checkpoint/storage.py and checkpoint/pretrained.py; read in torch 2.13."""
    from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StorageInfo
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    assert type(FileSystemWriter(tmp_path).fs) is FileSystem
    assert type(HuggingFaceStorageReader(str(tmp_path)).fs) is FileSystem
    assert {"create_stream", "rename", "ls"} <= set(vars(FileSystem))
    reader = FileSystemReader(tmp_path)
    assert type(reader.fs) is FileSystem
    (tmp_path / "file").write_bytes(b"abcdef")
    with (tmp_path / "file").open("rb") as file:
        assert reader._slice_file(file, _StorageInfo("file", 2, 3)).read() == b"cde"


def test_metadata_of_checkpoints_is_pickled_from_the_allowed_classes(tmp_path: Path) -> None:
    """checkpoint/metadata.py: what plain DCP writes can be read by the closed list."""
    import torch.distributed.checkpoint as dcp

    from onecopy.checkpoint.storage import Reader

    def save(rank: int) -> None:
        dcp.save({"a": torch.ones(2, 3), "b": {"c": 5}}, checkpoint_id=tmp_path)

    run_ranks(1, save, group=False)
    found = Reader(tmp_path).read_metadata().state_dict_metadata
    assert set(found) == {"a", "b.c"}


def test_queue_callback_runs_after_the_last_gradient() -> None:
    """sharding/graph/boundary.py; read in torch 2.13."""
    events: list[str] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def queue(_: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: events.append("end"))

    y.register_hook(queue)
    x.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    y.sum().backward()
    assert events == ["gradient", "end"]


def test_identity_node_of_a_unit_runs_after_all_of_its_backward() -> None:
    """sharding/graph/boundary.py rests on autograd taking ready nodes in the reverse order of their creation."""
    from onecopy.sharding.graph.boundary import mark_inputs
    from onecopy.sharding.graph.tensors import Edits

    events: list[str] = []
    weight = torch.ones(3, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda _: events.append("weight"))
    x = torch.ones(3, requires_grad=True)
    (inside,), _, marked = mark_inputs(lambda: events.append("unit"), (x * 1,), {}, Edits())
    (inside * weight.exp()).sum().backward()
    assert marked
    assert events == ["weight", "unit"]


def _fake_group(rank: int) -> tuple[int, float]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", rank=0, world_size=64, store=FakeStore())
    values = torch.ones(3)
    torch.distributed.all_reduce(values)
    size = torch.distributed.get_world_size()
    torch.distributed.destroy_process_group()
    return size, float(values.sum())


def test_fake_process_group_has_any_size_and_sends_nothing() -> None:
    """planner/engine/fake.py; read in torch 2.13."""
    assert run_ranks(1, _fake_group) == [(64, 3.0)]


def test_fake_tensors_have_storages_that_resize_and_can_be_left_for_a_moment() -> None:
    """planner/engine/fake.py; read in torch 2.13."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

    with FakeTensorMode(allow_non_fake_inputs=True):
        flat = torch.empty(64)
        view = flat[:16].view(4, 4)
        flat.untyped_storage().resize_(0)
        assert view.untyped_storage().nbytes() == 0
        flat.untyped_storage().resize_(256)
        assert view.untyped_storage().nbytes() == 256
        assert isinstance(flat, FakeTensor)
        with unset_fake_temporarily():
            assert not isinstance(torch.empty(1), FakeTensor)


def _gather_on_a_fake_group(rank: int) -> tuple[str, list[float]]:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4096)
    whole = torch.zeros(4096)
    dist.all_gather_single(whole, torch.ones(1))
    name = dist.get_backend()
    dist.destroy_process_group()
    return name, [whole.min().item(), whole.max().item()]


def _methods_of_a_group(rank: int) -> list[list[float]]:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    whole, part, same = torch.zeros(2), torch.zeros(1), torch.ones(1)
    options = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
    group.all_gather_single(whole, torch.ones(1)).wait()
    group.reduce_scatter_single(part, whole, options).wait()
    group.allreduce([same], dist.AllreduceOptions()).wait()
    dist.destroy_process_group()
    return [whole.tolist(), part.tolist(), same.tolist()]


def test_process_groups_have_the_methods_behind_the_functions() -> None:
    """comm/native_calls.py; read in torch 2.13. The fake group copies this rank's own values."""
    assert run_ranks(1, _methods_of_a_group, group=False) == [[[1.0, 1.0], [1.0], [1.0]]]


def test_fake_group_of_any_size_gathers_this_ranks_own_slice() -> None:
    """benchmarks/harness/fake.py; read in torch 2.13."""
    assert run_ranks(1, _gather_on_a_fake_group, group=False) == [("fake", [1.0, 1.0])]


def test_checkpoint_generator_saves_its_tensors_through_the_hooks_in_force() -> None:
    """activations/region.py; read in torch 2.13. In order, before it yields; and it calls the function in backward."""
    from torch.utils.checkpoint import _checkpoint_without_reentrant_generator, noop_context_fn

    packed: list[Tensor] = []
    calls: list[tuple[Tensor, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    def again(*tensors: Tensor) -> Tensor:
        calls.append(tensors)
        return tensors[0].exp() * tensors[1]

    x, y = (torch.full((2,), value, requires_grad=True) * 1 for value in (1.0, 2.0))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        generator = _checkpoint_without_reentrant_generator(again, True, noop_context_fn, "default", False, True, x, y)
        next(generator)
        assert [tensor[0].item() for tensor in packed] == [1.0, 2.0], f"moved in torch {torch.__version__}"
        out = x.exp() * y
        assert next(generator, "ended") == "ended"
    assert calls == []
    out.sum().backward()
    assert len(calls) == 1


def test_frombuffer_keeps_its_buffer_as_long_as_any_view_lives() -> None:
    """memory/arena.py rests on it: a piece is free when the last view of its tensor is gone."""
    import weakref

    buffer = memoryview(bytearray(64))
    gone: list[bool] = []
    weakref.finalize(buffer, gone.append, True)
    view = torch.frombuffer(buffer, dtype=torch.float32).view(4, 4)[1:]
    del buffer
    assert gone == []
    del view
    assert gone == [True]


def _strided(rank: int) -> tuple[list[float], bool]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    weight = torch.arange(12.0)
    placed = distribute_tensor(weight, init_device_mesh("cpu", (2,)), [_StridedShard(0, split_factor=3)])
    return placed.to_local().tolist(), torch.equal(placed.full_tensor(), weight)


def test_strided_shard_cuts_each_third() -> None:
    """recipes/tensor_parallel.py; read in torch 2.13."""
    assert run_ranks(2, _strided) == [([0, 1, 4, 5, 8, 9], True), ([2, 3, 6, 7, 10, 11], True)]


def test_hooks_of_saved_tensors_can_be_looked_at_pushed_and_popped() -> None:
    """sharding/bucket/saved.py; read in torch 2.13."""
    top, push, pop = (
        getattr(torch._C._autograd, f"_{verb}_saved_tensors_default_hooks") for verb in ("top", "push", "pop")
    )
    assert top(True) is None

    def pack(tensor: Tensor) -> Tensor:
        return tensor.detach()

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert top(True) == (pack, unpack)
        push(unpack, pack)
        assert top(True) == (unpack, pack)
        pop()
        assert top(True) == (pack, unpack)
    assert top(True) is None


def test_hooks_get_views_whose_storage_and_version_are_the_originals() -> None:
    """sharding/bucket/saved.py: `UntypedStorage._cdata` names a storage, and a detached output shares its version."""
    weight, x = torch.ones(5, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    seen: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t.detach(), lambda t: t):
        y = torch.sigmoid(x @ weight.t())
    assert sum(t.untyped_storage()._cdata == weight.untyped_storage()._cdata for t in seen) == 1
    y.detach().add_(1)
    assert [t._version for t in seen if t.shape == y.shape] == [1]


def test_holders_of_a_parameter_are_counted() -> None:
    """sharding/bucket/bucket.py: `Tensor._use_count` and `torch._C._storage_Use_Count`; read in torch 2.13."""
    flat = torch.ones(9)
    weight = torch.nn.Parameter(flat.view(3, 3))
    node = torch.autograd.graph.get_gradient_edge(weight).node
    storage = flat.untyped_storage()

    def counts() -> tuple[int, int]:
        return torch._C._storage_Use_Count(storage._cdata), weight._use_count()

    at_first = counts()
    product = torch.ones(2, 3, requires_grad=True) @ weight
    assert counts()[1] > at_first[1]
    product.sum().backward()
    view = weight.detach()
    assert counts()[0] == at_first[0] + 1
    del product, view
    assert counts() == at_first
    assert node is not None


def test_transforms_of_torch_func_can_be_noticed() -> None:
    """sharding/graph/boundary.py: `torch._C._functorch.peek_interpreter_stack`; read in torch 2.13."""
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(torch._C._functorch.peek_interpreter_stack() is not None)
        return x.sum()

    look(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    torch.func.jvp(look, (torch.ones(2),), (torch.ones(2),))
    torch.func.jacrev(look)(torch.ones(2))
    assert seen == [False, True, True, True]


def test_modules_name_their_non_persistent_buffers() -> None:
    """sharding/engine/buffers.py; read in torch 2.13."""
    module = torch.nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("left", torch.zeros(1), persistent=False)
    assert module._non_persistent_buffers_set == {"left"}


def test_storages_without_memory_can_be_told_apart() -> None:
    """sharding/model/shared.py; read in torch 2.13."""
    one, other = torch.empty(2, device="meta"), torch.empty(2, device="meta")
    assert one.untyped_storage()._cdata == one[1:].untyped_storage()._cdata != other.untyped_storage()._cdata


def test_state_dict_functions_have_their_settings_in_info() -> None:
    """sharding/setup/state_dicts.py; read in torch 2.13."""
    import inspect

    from torch.distributed.checkpoint import state_dict

    for name in ("_get_model_state_dict", "_get_optim_state_dict"):
        assert "info" in inspect.signature(getattr(state_dict, name)).parameters, f"moved in torch {torch.__version__}"
    assert {"full_state_dict", "cpu_offload"} <= set(state_dict._StateDictInfo.__dataclass_fields__)


def test_the_default_groups_store_is_to_be_had() -> None:
    """comm/monitor.py; read in torch 2.13."""
    from torch.distributed.distributed_c10d import _get_default_store

    def run(rank: int) -> str:
        store = _get_default_store()
        assert not store.check(["onecopy-nobody-sets-this"])
        store.set("onecopy-set", "a value")
        return store.get("onecopy-set").decode()

    assert run_ranks(1, run) == ["a value"]


def test_a_process_group_takes_another_time_limit_and_names_begin_anew() -> None:
    """resilience/meeting.py; read in torch 2.13."""
    from torch.distributed.distributed_c10d import _set_pg_timeout, _world
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def limit(rank: int) -> tuple[float, int, int]:
        _set_pg_timeout(timedelta(seconds=7), torch.distributed.group.WORLD)
        group = torch.distributed.group.WORLD
        assert group is not None
        seconds = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        names, groups = _world.group_count, len(_world.pg_map)
        torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
        assert torch.distributed.get_backend() == "fake"
        return seconds, names, groups

    assert run_ranks(2, limit) == [(7.0, 1, 1)] * 2


def test_a_scaler_keeps_by_optimizer_whether_gradients_are_unscaled() -> None:
    """resilience/capsules.py; read in torch 2.13."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    assert not scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    assert scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
