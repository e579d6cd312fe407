"""Every misuse is a clear error at once, on every rank alike; never a crash, a hang or a silently wrong number.

The oracle is the issue's list of errors: each message must name what is wrong and what to do instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, AdamW

import onecopy
from models import VOCAB, Stack, TinyGPT, seeded, token_batches, vector_batches
from odd_models import Convolutions
from one_fork import Forked, On, one_fork
from onecopy.errors import (
    NeedsWholeError,
    OnecopyError,
    SettingsError,
    UsageError,
)
from onecopy.sharding.model import discover
from oracle import (
    OPTIMIZERS,
    assert_same_weights,
    assert_trains_like_twin,
    gathered_weights,
    part,
    train_twin,
    whole_weights,
)
from ranks import everywhere, run_ranks
from stack_loops import stack, step

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


# --- settings


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"stage": 4}, ["stage", "4"]),
        ({"stage": -1}, ["stage", "-1"]),
        ({"stage": "3"}, ["stage", "'3'"]),
        ({"stage": True}, ["stage", "True"]),
        ({"stage": 2, "precision": "bf32"}, ["bf32", "bf16"]),
        ({"stage": 2, "precision": torch.int8}, ["precision"]),
        ({"stage": 2, "accumulate": 0}, ["accumulate", "0"]),
        ({"stage": 2, "accumulate": 1.5}, ["accumulate", "1.5"]),
        ({"stage": 2, "prefetch": -1}, ["prefetch", "-1"]),
        ({"stage": 3, "prefetch_bytes": -1}, ["prefetch_bytes", "-1"]),
        ({"stage": 2, "units": "blocks"}, ["units", "blocks"]),
        ({"stage": 2, "units": ["blocks.7"]}, ["units", "blocks.7"]),
        ({"stage": 2, "units": [nn.Conv2d]}, ["units", "Conv2d"]),
        ({"stage": 2, "units": [nn.Linear(2, 2)]}, ["units"]),
        ({"stage": 2, "broadcast_buffers": "no"}, ["broadcast_buffers", "'no'", "False"]),
        ({"stage": 2, "defragment": 1}, ["defragment", "1"]),
        ({"stage": 2, "mesh": (2, 2)}, ["mesh", "init_device_mesh"]),
        ({"stage": 2, "activations": "cpu"}, ["activations", "'cpu'", "onecopy.Activations"]),
        ({"stage": 2, "optimizer": SGD}, ["optimizer"]),
    ],
)
@one_fork
def test_a_setting_that_cannot_work_is_named(settings: dict[str, Any], words: list[str]) -> Forked:
    """A ValueError before any work starts; the model is left as it was."""

    def run(rank: int) -> str:
        model = stack()
        before = list(model.parameters())
        with pytest.raises(SettingsError) as caught:
            onecopy.shard(model, **settings)
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, OnecopyError)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        return str(caught.value)

    (message,) = yield On(1, run, group=False)
    assert all(word in message for word in words), message


@one_fork
def test_an_unknown_setting_is_refused() -> Forked:
    def run(rank: int) -> None:
        with pytest.raises(TypeError, match="shard_everything"):
            onecopy.shard(stack(), 2, shard_everything=True)  # type: ignore[call-arg]

    yield On(1, run, group=False)


@pytest.mark.parametrize("value", [torch.int32, "bf16", 16])
def test_a_precision_that_is_no_floating_dtype_is_named(value: Any) -> None:
    with pytest.raises(SettingsError, match=r"Precision\.reduce"):
        onecopy.Precision(reduce=value)


@pytest.mark.parametrize("names", [None, ("data",), ("replicate", "pipeline"), ("dp", "dp_shard")])
@one_fork
def test_a_mesh_with_other_axes_is_refused(names: tuple[str, ...] | None) -> Forked:
    def run(rank: int) -> None:
        shape = (2,) if names and len(names) == 1 else (1, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        with pytest.raises(SettingsError, match=r"shard.*replicate"):
            onecopy.shard(stack(), 2, mesh=mesh)

    yield On(2, run)


@pytest.mark.parametrize("names", [None, ("dp",), ("dp_shard",), ("dp_replicate",), ("dp_replicate", "dp_shard")])
@one_fork
def test_a_mesh_named_as_others_do_is_understood(names: tuple[str, ...] | None) -> Forked:
    """Oracle: the names by hand. A mesh without names has one axis, along which is sharded."""

    def run(rank: int) -> None:
        shape = (1, 2) if names and len(names) == 2 else (2,)
        model = onecopy.shard(stack(), 2, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
        found = onecopy.ledger(model)
        step(model, rank, 2)
        axis = "replicate" if names == ("dp_replicate",) else "shard"
        assert found.total.bytes_sent("reduce_scatter", axis="shard") + found.total.bytes_sent("all_reduce") > 0
        assert {entry.axis for entry in found.total.entries if entry.bytes_sent} == {axis}

    yield On(2, run)


@one_fork
def test_a_model_without_parameters_is_refused() -> Forked:
    def run(rank: int) -> None:
        with pytest.raises(SettingsError, match="no parameters"):
            onecopy.shard(nn.Tanh(), 2)

    yield On(1, run, group=False)


# --- what cannot be done to a sharded model


@STAGES
@pytest.mark.parametrize("which", ["the model", "a block", "a parent"])
@one_fork
def test_sharding_twice_is_refused(which: str, stage: int) -> Forked:
    def run(rank: int) -> None:
        model = onecopy.shard(stack(), stage)
        again: nn.Module = {
            "the model": model,
            "a block": model.blocks[0],
            "a parent": nn.Sequential(nn.Linear(2, 2), model),
        }[which]
        with pytest.raises(UsageError, match="sharded already"):
            onecopy.shard(again, stage)
        step(model, rank, 2)

    yield On(2, run)


@STAGES
@pytest.mark.parametrize("which", ["the model", "a block"])
@one_fork
def test_deep_copying_a_sharded_model_is_refused(which: str, stage: int) -> Forked:
    def run(rank: int) -> None:
        model = onecopy.shard(stack(), stage)
        with pytest.raises(UsageError, match=r"deep-copied.*model\.state_dict"):
            copy.deepcopy(model if which == "the model" else model.blocks[0])
        step(model, rank, 2)

    yield On(2, run)


@one_fork
def test_deep_copying_a_gathered_model_is_refused_and_its_state_dict_is_not() -> Forked:
    """torch's AveragedModel copies; what it would copy here are the engine and its process groups."""

    def run(rank: int) -> None:
        model, other = onecopy.shard(stack(), 3), Stack()
        with onecopy.gathered(model):
            with pytest.raises(UsageError, match=r"neither deep-copied nor pickled.*state_dict"):
                copy.deepcopy(model)
            other.load_state_dict(copy.deepcopy(model.state_dict()))
        assert_same_weights(whole_weights(other), whole_weights(stack()))
        step(model, rank, 2)

    yield On(2, run)


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
    "to(dtype)": lambda model: model.to(torch.bfloat16),
    "to(device)": lambda model: model.to("meta"),
    "to_empty": lambda model: model.to_empty(device="meta"),
    "half of a block": lambda model: model.blocks[1].half(),
}


@STAGES
@pytest.mark.parametrize("conversion", CONVERSIONS)
@one_fork
def test_converting_a_sharded_model_is_refused(conversion: str, stage: int) -> Forked:
    """And leaves it as it was: the next step trains."""

    def run(rank: int) -> None:
        model = onecopy.shard(stack(), stage)
        with pytest.raises(UsageError, match=r"before onecopy\.shard"):
            CONVERSIONS[conversion](model)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        step(model, rank, 2)

    yield On(2, run)


@pytest.mark.parametrize("conversion", ["float", "cpu", "to(float32)"])
@one_fork
def test_conversions_that_change_nothing_are_allowed(conversion: str) -> Forked:
    def run(rank: int) -> None:
        model = onecopy.shard(stack(), 3)
        before = list(model.parameters())
        {"float": model.float, "cpu": model.cpu, "to(float32)": lambda: model.to(torch.float32)}[conversion]()
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        step(model, rank, 2)

    yield On(2, run)


@STAGES
@one_fork
def test_another_order_of_elements_is_refused_and_the_same_one_is_not(stage: int) -> Forked:
    """Slices keep the order in which a weight's elements lay, so the conversion would do nothing."""

    def run(rank: int) -> None:
        for order, other in (
            (torch.channels_last, torch.contiguous_format),
            (torch.contiguous_format, torch.channels_last),
        ):
            model = onecopy.shard(Convolutions().to(memory_format=order), stage)
            with pytest.raises(UsageError, match=rf"blocks\.0\.weight.*memory_format={other}\) before onecopy\.shard"):
                model.to(memory_format=other)
            assert model.to(memory_format=order) is model
            with onecopy.gathered(model):
                assert model.blocks[0].weight.is_contiguous(memory_format=order)

    yield On(2, run)


@STAGES
@one_fork
def test_a_parameter_unfrozen_after_sharding_is_named(stage: int) -> Forked:
    def run(rank: int) -> None:
        model = stack()
        model.blocks[1].requires_grad_(False)
        onecopy.shard(model, stage)
        model.blocks[1].requires_grad_(True)
        with pytest.raises(UsageError, match=r"requires_grad.*blocks\.1\.0\.weight"):
            step(model, rank, 2)
        with torch.no_grad():
            model(*part(vector_batches(1)[0], rank, 2))

    yield On(2, run)


def _new_weight(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(torch.zeros(3, 10))


def _new_module(model: nn.Module) -> None:
    model.head = nn.Linear(10, 3)


def _new_module_in_a_list(model: nn.Module) -> None:
    model.blocks.append(nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(10, 10))))


def _new_parameter(model: nn.Module) -> None:
    model.blocks[1].scale = nn.Parameter(torch.ones(10))


@STAGES
@pytest.mark.parametrize(
    "change, words",
    [
        (_new_weight, r"head\.weight.*gathered"),
        (_new_module, r"head\.weight.*before"),
        (_new_module_in_a_list, r"blocks\.3\.1\.0\.weight.*before"),
        (_new_parameter, r"blocks\.1\.scale.*before"),
    ],
)
@one_fork
def test_a_parameter_that_comes_after_sharding_is_named_where_it_comes(
    change: Callable[[nn.Module], None], words: str, stage: int
) -> Forked:
    """Nobody would average its gradients: ranks would drift apart. Before and after a forward, and inside gathered."""

    def run(rank: int) -> None:
        model = onecopy.shard(stack(), stage)
        before = {name: id(p) for name, p in model.named_parameters()}
        with pytest.raises((UsageError, RuntimeError), match=words):
            change(model)
        step(model, rank, 2)
        with pytest.raises((UsageError, RuntimeError), match=words):
            change(model)
        with onecopy.gathered(model, write=True), pytest.raises((UsageError, RuntimeError), match=words):
            change(model)
        assert {name: id(p) for name, p in model.named_parameters()} == before
        step(model, rank, 2)

    yield On(2, run)


@STAGES
@pytest.mark.parametrize("device", ["cpu", "meta"])
@one_fork
def test_a_state_that_is_assigned_is_copied_into_the_slices(device: str, stage: int) -> Forked:
    """load_state_dict(assign=True): parameters stay the slices that they are, with the values of the whole tensors."""

    def run(rank: int) -> None:
        with torch.device(device):
            model = onecopy.shard(Stack(), stage)
        model.load_state_dict(stack().state_dict(), assign=True)
        assert all(isinstance(parameter, onecopy.SlicedTensor) for parameter in model.parameters())
        assert_same_weights(gathered_weights(model), whole_weights(stack()), atol=0)
        step(model, rank, 2)

    yield On(2, run)


@STAGES
@one_fork
def test_modules_without_new_parameters_may_come_after_sharding(stage: int) -> Forked:
    """A wrapper, another activation, and the module itself once more; other models are nobody's concern."""

    def run(rank: int) -> None:
        model = onecopy.shard(stack(), stage)
        model.blocks[0][1] = nn.GELU()
        model.blocks[1] = torch.nn.Sequential(model.blocks[1])
        model.head = model.head
        model.head.weight = model.head.weight
        other = stack()
        other.head = nn.Linear(10, 3)
        other.head.weight = nn.Parameter(torch.zeros(3, 10))
        step(model, rank, 2)

    yield On(2, run)


@STAGES
@one_fork
def test_a_parameter_replaced_behind_torchs_back_is_named(stage: int) -> Forked:
    """At any of its places, by those who write to `_parameters`."""

    def run(rank: int) -> None:
        model = TinyGPT()
        onecopy.shard(model, stage)
        model.head._parameters["weight"] = nn.Parameter(torch.zeros(VOCAB, 12))
        with pytest.raises(UsageError, match=r"tokens\.weight.*gathered"):
            model(token_batches(1)[0][0])

    yield On(2, run)


@STAGES
@one_fork
def test_a_model_on_meta_says_what_gives_it_values(stage: int) -> Forked:
    """Whatever is done with it first; afterwards it is as it was."""

    def run(rank: int) -> None:
        with torch.device("meta"):
            model = onecopy.shard(Stack(), stage)
        ways: list[Callable[[], Any]] = [
            lambda: step(model, rank, 2),
            lambda: model.blocks[0](torch.zeros(1, 10)),
            lambda: onecopy.gathered(model).__enter__(),
            lambda: onecopy.gathered(model.blocks[0]).__enter__(),
            lambda: onecopy.gathered(model.head.weight).__enter__(),
            lambda: onecopy.save("nowhere", model),
            lambda: model.to_empty(device="cpu"),
        ]
        for way in ways:
            with pytest.raises((UsageError, RuntimeError), match=r"onecopy\.materialize"):
                way()
        onecopy.materialize(model)
        step(model, rank, 2)

    yield On(2, run)


@STAGES
@one_fork
def test_a_gradient_assigned_whole_is_named(stage: int) -> Forked:
    def run(rank: int) -> None:
        model = onecopy.shard(stack(), stage)
        optimizer = SGD(model.parameters(), lr=0.5)
        before = gathered_weights(model)
        for parameter in model.parameters():
            parameter.grad = torch.ones(parameter.shape)
        with pytest.raises(UsageError, match=r"blocks\.0\.0\.weight.*zeros_like"):
            optimizer.step()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter).copy_(torch.ones(parameter.shape))
        optimizer.step()
        for name, weight in gathered_weights(model).items():
            torch.testing.assert_close(weight, before[name] - 0.5)

    yield On(2, run)


@one_fork
def test_what_asks_for_the_model_as_code_or_memory_is_refused_in_one_sentence(tmp_path: Path) -> Forked:
    """At the place where it happens; the model goes on."""

    def run(rank: int) -> None:
        model = onecopy.shard(stack(), 3)
        for act, match in {
            lambda: model.head.weight.detach().numpy(): r"'head\.weight'.*onecopy\.gathered",
            lambda: model.head.weight.tolist(): r"'head\.weight'.*onecopy\.gathered",
            lambda: numpy.asarray(model.head.weight.detach()): r"'head\.weight'.*onecopy\.gathered",
            lambda: torch.jit.script(model): r"torch\.jit\.script on the plain model",
            lambda: torch.jit.script(model.blocks[0]): r"torch\.jit\.script on the plain model",
            lambda: torch.save(model, tmp_path / f"{rank}"): r"torch\.save\(model\).*onecopy\.save",
            lambda: torch.save(model.blocks, tmp_path / f"{rank}"): r"torch\.save\(model\).*onecopy\.save",
            lambda: torch.save({"model": model.head}, tmp_path / f"{rank}"): r"torch\.save\(model\).*onecopy\.save",
        }.items():
            with pytest.raises(UsageError, match=match):
                act()
        step(model, rank, 2)

    yield On(2, run)


@pytest.mark.parametrize("write", [False, True])
@one_fork
def test_parameters_that_are_replaced_inside_gathered_are_not_dropped_in_silence(write: bool) -> Forked:
    """As transformers' resize_token_embeddings does: a new module, or a new parameter in the old one."""

    def run(rank: int) -> None:
        def new_module(model: Any) -> None:
            model.head = nn.Linear(10, 5)

        def new_parameter(model: Any) -> None:
            model.head.weight = nn.Parameter(torch.cat([model.head.weight, torch.zeros(2, 10)]))

        def new_data(model: Any) -> None:
            model.head.weight.data = torch.zeros(5, 10)

        for replace in (new_module, new_parameter, new_data):
            model = onecopy.shard(stack(), 3)
            with (
                pytest.raises(UsageError, match=r"'head\.weight'.*resize_token_embeddings.*before onecopy\.shard"),
                onecopy.gathered(model, write=write),
            ):
                replace(model)

    yield On(2, run)


USES: dict[str, Callable[[nn.Module], Any]] = {
    "matmul": lambda m: torch.ones(2, 10) @ m.head.weight.t(),
    "indexing": lambda m: m.head.weight[0],
    "sum along a dim": lambda m: m.head.weight.sum(0),
    "item": lambda m: m.head.bias[0].item(),
    "reshape": lambda m: m.head.weight.reshape(-1),
    "cat": lambda m: torch.cat([p.flatten() for p in m.parameters()]),
    "xavier": lambda m: nn.init.xavier_uniform_(m.head.weight.detach().view(3, 10)),
    "any nan along a dim": lambda m: m.head.weight.isnan().any(dim=1),
    "max along a dim": lambda m: m.head.weight.abs().max(dim=0),
    "where the largest is": lambda m: m.head.weight.argmax(),
    "functional": lambda m: F.linear(torch.ones(2, 10), m.head.weight, m.head.bias),
    "norm along a dim": lambda m: m.head.weight.norm(dim=1),
}


@STAGES
@pytest.mark.parametrize("use", USES)
@one_fork
def test_reading_a_sliced_parameter_as_if_it_were_whole_is_refused(use: str, stage: int) -> Forked:
    """At every stage, so that a loop that works at one works at all; the message names the parameter and the way."""

    def run(rank: int) -> None:
        model = onecopy.shard(stack(), stage)
        with pytest.raises(NeedsWholeError, match=r"(head|blocks)\S*(weight|bias).*gathered"):
            USES[use](model)
        step(model, rank, 2)

    yield On(2, run)


@pytest.mark.parametrize("use", [lambda p: p.detach().numpy(), lambda p: p.detach().tolist()])
@one_fork
def test_what_torch_itself_refuses_of_tensor_subclasses_is_an_error(use: Callable[[Tensor], Any]) -> Forked:
    """No dispatch reaches us for these; torch's own error must come, not one slice passed off as the whole."""

    def run(rank: int) -> None:
        with pytest.raises(RuntimeError):
            use(onecopy.shard(stack(), 3).head.weight)

    yield On(2, run)


# --- optimizers


@STAGES
@pytest.mark.parametrize("optimizer", [SGD, AdamW])
@one_fork
def test_an_optimizer_that_holds_unsharded_parameters_is_found_at_its_first_step(optimizer: Any, stage: int) -> Forked:
    def run(rank: int) -> None:
        model = stack()
        made = optimizer(model.parameters(), lr=0.1)
        onecopy.shard(model, stage)
        with pytest.raises(UsageError, match=r"blocks\.0\.0\.weight.*optimizer="):
            step(model, rank, 2, made)

    yield On(2, run)


@one_fork
def test_an_optimizer_of_another_model_is_refused_before_the_model_is_changed() -> Forked:
    def run(rank: int) -> None:
        model = stack()
        with pytest.raises(UsageError, match="none of the model's parameters"):
            onecopy.shard(model, 2, optimizer=SGD(stack().parameters(), lr=0.1))
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters()), "the model was changed"

    yield On(2, run)


@STAGES
@one_fork
def test_a_step_in_the_middle_of_accumulation_is_refused(stage: int) -> Forked:
    """Under no_sync stages 0 and 1 have kept gradients that nobody has reduced: stepping would use none of them."""

    def run(rank: int) -> None:
        model = onecopy.shard(stack(), stage)
        optimizer = SGD(model.parameters(), lr=0.1)
        batch = part(vector_batches(1)[0], rank, 2)
        with model.no_sync():
            model(*batch).backward()
        if stage < 2:
            with pytest.raises(UsageError, match="reduce_gradients"):
                optimizer.step()
            with pytest.raises(UsageError, match="reduce_gradients"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        model.reduce_gradients()
        optimizer.step()

    yield On(2, run)


@STAGES
@one_fork
def test_a_step_between_forward_and_backward_is_refused(stage: int) -> Forked:
    """Autograd would refuse it in one process too ("modified by an inplace operation")."""

    def run(rank: int) -> None:
        model = onecopy.shard(stack(), stage)
        optimizer = SGD(model.parameters(), lr=0.1)
        batch = part(vector_batches(1)[0], rank, 2)
        model(*batch).backward()
        loss = model(*batch)
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"changed between|modified by an inplace"):
            loss.backward()
        optimizer.zero_grad()
        step(model, rank, 2, optimizer)

    yield On(2, run)


# --- what a user who had the docs alone found


def _raised(act: Callable[[], object]) -> str:
    with pytest.raises(OnecopyError) as caught:
        act()
    return str(caught.value)


@one_fork
def test_a_state_dict_of_a_part_gives_a_meta_model_no_values(tmp_path: Path) -> Forked:
    """The rest would be zeros, without a word. Whole, it is taken, with the values that it has."""

    def run(rank: int) -> tuple[str, str, bool]:
        with torch.device("meta"):
            model = seeded(Stack)
        onecopy.shard(model, 3)
        whole = seeded(Stack).state_dict()
        part_of_it = {name: value for name, value in whole.items() if "head" not in name}
        first = _raised(lambda: model.blocks[0].load_state_dict(seeded(Stack).blocks[0].state_dict(), assign=True))
        second = _raised(lambda: model.load_state_dict(part_of_it, strict=False, assign=True))
        model.load_state_dict(whole, assign=True)
        with onecopy.gathered(model):
            return first, second, all(torch.equal(model.get_parameter(name), value) for name, value in whole.items())

    for first, second, equal in (yield On(2, run)):
        assert "would have no values" in first
        assert "'head." in second
        assert equal


@one_fork
def test_slices_in_extra_are_refused(tmp_path: Path) -> Forked:
    """The first rank's alone would be kept. As `rank_extra` each rank's come back."""

    def run(rank: int) -> tuple[str, bool]:
        model = onecopy.shard(seeded(Stack), 3)
        average = onecopy.ema(model, 0.9)
        kept = [value.detach().local.clone() for value in average.state_dict().values() if hasattr(value, "local")]
        message = _raised(lambda: onecopy.save(tmp_path, model, step=1, extra={"ema": [average.state_dict()]}))
        onecopy.save(tmp_path, model, step=1, rank_extra={"ema": average.state_dict()})
        loaded = onecopy.load(tmp_path, model).rank_extra["ema"]
        back = [value.detach().local for value in loaded.values() if hasattr(value, "local")]
        return message, all(map(torch.equal, kept, back))

    for message, equal in (yield On(2, run)):
        assert "rank_extra=" in message
        assert equal


@everywhere
@one_fork
def test_numpy_of_a_weight_in_forward_shows_what_plain_torch_shows(stage: int, num_ranks: int) -> Forked:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(10, 3)
            self.seen: list[float] = []

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.seen.append(float(self.layer.weight.detach().numpy().sum()))
            return nn.functional.mse_loss(self.layer(x), y)

    def run(rank: int) -> None:
        model = assert_trains_like_twin(rank, num_ranks, lambda: seeded(Looks), vector_batches(2), stage=stage)
        twin = seeded(Looks)
        train_twin(twin, OPTIMIZERS["sgd"], vector_batches(2))
        assert model.seen == pytest.approx(twin.seen, rel=1e-5)

    yield On(num_ranks, run)


@one_fork
def test_what_cannot_be_done_to_a_sharded_model_says_what_to_do() -> Forked:
    def run(rank: int) -> list[str]:
        model = onecopy.shard(seeded(Stack), 3)
        shared = _raised(model.share_memory)
        wrapped = _raised(lambda: nn.parallel.DistributedDataParallel(model))
        with torch.device("meta"):
            meta = nn.Linear(3, 3)
        onecopy.shard(meta, 3)
        early = SGD(meta.parameters(), lr=0.1)
        onecopy.materialize(meta, device="cpu")
        meta(torch.ones(1, 3)).sum().backward()
        stale = _raised(early.step)
        model.blocks[0](torch.ones(1, 10)).sum().backward()
        partly = _raised(SGD(model.parameters(), lr=0.1).step)
        return [shared, wrapped, stale, partly]

    expected = [
        "share_memory() before onecopy.shard",
        "do not wrap",
        "after onecopy.materialize",
        "call the model itself",
    ]
    for messages in (yield On(2, run)):
        for message, words in zip(messages, expected, strict=True):
            assert words in message


def test_small_blocks_cast_their_inputs_under_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """They leave their parameters to the root, and a block may still hand fp32 on. Oracle: units that are named."""
    monkeypatch.setattr(discover, "SMALL_BYTES", 2**18)

    class Widens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(10), nn.Linear(10, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.norm(x)).float()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Widens() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    def run(rank: int) -> list[float]:
        losses = []
        for units in ("auto", [Widens]):
            model = onecopy.shard(seeded(Net), 3, precision="bf16", units=units)
            loss = model(vector_batches(1)[0][0])
            loss.backward()
            losses.append(float(loss))
        return losses

    for auto, named in run_ranks(2, run):
        assert auto == named


@one_fork
def test_a_model_in_ddp_is_refused() -> Forked:
    """It would keep whole parameters and buckets of its own beside the slices."""

    def run(rank: int) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.parallel.DistributedDataParallel(nn.Linear(4, 4)))
        with pytest.raises(UsageError, match=r"module '1' is a DistributedDataParallel.*`\.module`"):
            onecopy.shard(model, stage=3)
        assert not any(isinstance(p, onecopy.SlicedTensor) for p in model.parameters())

    yield On(2, run)


@pytest.mark.parametrize("stage", [0, 3])
@one_fork
def test_a_slice_that_is_written_to_inside_gathered_is_named(stage: int) -> Forked:
    """On one rank alone too, which would wait for the others there."""

    def run(rank: int) -> None:
        model = onecopy.shard(seeded(Stack), stage)
        aside = model.head.weight
        with torch.no_grad(), onecopy.gathered(aside, write=True) as whole:
            if rank == 0:
                with pytest.raises(UsageError, match=r"inside onecopy.gathered.*model.layer.weight"):
                    aside.data.mul_(0.5)
            whole.fill_(2.0)
        aside.data.mul_(0.5)
        with onecopy.gathered(aside) as whole:
            assert torch.equal(whole, torch.ones_like(whole))

    yield On(2, run)
