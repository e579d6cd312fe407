"""The meter and the profile: bytes against closed forms from the paper and from shapes, and steadiness over steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import onecopy
from one_fork import Forked, On, one_fork
from onecopy.observe.meter import beside, cgroup_limit
from ranks import run_ranks

WIDTH = 64


class Net(nn.Module):
    """Equal blocks between a small entry and head, of sizes that need no padding but at the ends of slices."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.entry = nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).float().square().mean()


BLOCK = WIDTH * WIDTH + WIDTH
ROOT = 16 * WIDTH + WIDTH + WIDTH * 8 + 8


def _batch(rank: int) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))


def _sizes(
    rank: int, stage: int, depth: int, steps: int = 2, precision: str = "bf16", micro_batches: int = 1
) -> dict[str, dict[str, int]]:
    torch.manual_seed(0)
    model = onecopy.shard(Net(depth), stage, precision=precision, accumulate=micro_batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    meter = onecopy.meter(model)
    states = []
    for _ in range(steps):
        meter.reset_peaks()
        for _ in range(micro_batches):
            first = dict(meter.live)
            model(_batch(rank)).backward()
        optimizer.step()
        # Gradients are still there: this is when a rank holds all of its model states.
        held = dict(meter.live)
        optimizer.zero_grad()
        states.append(dict(meter.live))
    highest = {c: max(peak[c] for peak in meter.peaks.values()) for c in meter.live}
    return {"held": held, "highest": highest, "last": states[-1], "earlier": states[-2], "before_last": first}


def _with_whole_parameters(got: dict[str, dict[str, int]], stage: int) -> dict[str, int]:
    """What is held after a step, with the whole parameters of forward: the paper adds them up, though backward lets go
    of them at stages 1 and 2, before the last slices of gradients are there."""
    return got["held"] | {"parameters_gathered": got["highest"]["parameters_gathered"] if stage < 3 else 0}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_model_states_are_the_papers_bytes(stage: int, num_ranks: int) -> Forked:
    """Oracle: ZeRO §3.1 and §5, with gradients of 4 bytes where the paper has 2, for they are summed in fp32.

    fp32 masters and AdamW's two moments are the paper's K = 12; whole bf16 parameters are its 2Ψ.
    """
    depth = 6
    psi = ROOT + depth * BLOCK
    shards = 1 if stage == 0 else num_ranks
    for got in (yield On(num_ranks, _sizes, stage, depth)):
        held = _with_whole_parameters(got, stage)
        assert got["held"]["parameters_gathered"] == (held["parameters_gathered"] if stage == 0 else 0)
        assert held["parameters_sliced"] + held["optimizer"] == pytest.approx(12 * psi / shards, rel=0.01)
        assert held["gradients_sliced"] == pytest.approx(4 * psi / shards, rel=0.01)
        assert held["parameters_gathered"] == (pytest.approx(2 * psi, rel=0.01) if stage < 3 else 0)
        total = sum(v for c, v in held.items() if c not in ("communication", "activations"))
        paper = 16 * psi / num_ranks if stage == 3 else 2 * psi + 16 * psi / shards
        assert total == pytest.approx(paper, rel=0.01)


def _states(held: dict[str, int], depth: int, shards: int) -> float:
    """Bytes of model states as the paper counts them: without AdamW's counters, 4 bytes a tensor, and padding apart."""
    psi = ROOT + depth * BLOCK
    total = sum(v for c, v in held.items() if c not in ("communication", "activations"))
    padding = held["parameters_sliced"] - 4 * psi / shards + max(0.0, held["parameters_gathered"] - 2 * psi)
    assert 0 <= padding < 0.01 * total
    return total - padding - 4 * (2 * depth + 4)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 2, 3])
@one_fork
def test_with_lean_gradients_model_states_are_the_papers_bytes(stage: int, num_ranks: int) -> Forked:
    """Oracle: ZeRO §3.1 and §5: 16Ψ, 2Ψ + 14Ψ/N, 16Ψ/N; of the last, 2Ψ/N of bf16 parameters are not kept here.

    To the byte where every rank holds as much (N = 1), else within 1 %, for slices end where they may.
    """
    depth = 6
    psi = ROOT + depth * BLOCK
    paper = {0: 16 * psi, 2: 2 * psi + 14 * psi / num_ranks, 3: 16 * psi / num_ranks}[stage]
    if stage == 3:
        paper -= 2 * psi / num_ranks
    shards = 1 if stage == 0 else num_ranks
    for got in (yield On(num_ranks, _sizes, stage, depth, 2, "bf16-lean")):
        held = _with_whole_parameters(got, stage)
        assert held["gradients_sliced"] == pytest.approx(2 * psi / shards, rel=0.01)
        assert _states(held, depth, shards) == pytest.approx(paper, rel=0 if shards == 1 else 0.01)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@one_fork
def test_with_lean_gradients_stage_1_is_the_papers_while_gradients_are_whole(num_ranks: int) -> Forked:
    """Oracle: ZeRO §5, 4Ψ + 12Ψ/N, between two micro-batches of a step; kept gradients are padded as parameters are."""
    depth = 6
    psi = ROOT + depth * BLOCK
    for got in (yield On(num_ranks, _sizes, 1, depth, 2, "bf16-lean", 2)):
        between = got["before_last"]
        assert between["gradients_whole"] == pytest.approx(2 * psi, rel=0.01)
        assert between["gradients_sliced"] == 0
        assert _states(between, depth, num_ranks) == pytest.approx(4 * psi + 12 * psi / num_ranks, rel=0.01)


@pytest.mark.parametrize("stage", [2, 3])
def test_windows_do_not_grow_with_depth(stage: int) -> None:
    """Oracle: shapes. The root, the unit that computes and the next; one unit's gradients coming, two going."""
    shallow, deep = (run_ranks(2, _sizes, stage, depth)[0]["highest"] for depth in (6, 12))
    if stage == 3:
        # Each of the three may be padded by less than 8 elements a rank.
        assert 0 <= deep["parameters_gathered"] - 2 * (ROOT + 2 * BLOCK) < 3 * 2 * 8 * 2
    bound = 2 * (BLOCK + 2 * max(BLOCK, ROOT) + ROOT)
    assert 0 < deep["gradients_whole"] <= bound
    assert deep["gradients_whole"] == shallow["gradients_whole"]
    assert deep["communication"] == shallow["communication"] > 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_nothing_grows_after_the_second_step(stage: int) -> Forked:
    for got in (yield On(2, _sizes, stage, 4, 5)):
        assert got["last"] == got["earlier"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_no_category_is_ever_below_zero_or_missing_in_the_sum(stage: int) -> Forked:
    """Over micro-batches, no_sync, a second backward through a graph, evaluation, and a step that is ended early."""

    def run(rank: int) -> None:
        model = onecopy.shard(Net(3), stage, accumulate=2, activations=onecopy.Activations())
        optimizer, meter = torch.optim.AdamW(model.parameters()), onecopy.meter(model)
        changes = []

        def look() -> None:
            changes.append(min(meter.live.values()) >= 0 and sum(meter.live.values()) == meter.total)

        meter.listener = look
        for _ in range(3):
            with model.no_sync():
                model(_batch(rank)).backward()
            loss = model(_batch(rank))
            loss.backward(retain_graph=True)
            loss.backward()
            del loss
            with torch.no_grad():
                model(_batch(rank))
            model(_batch(rank)).backward()
            model.reduce_gradients()
            optimizer.step()
            optimizer.zero_grad()
        assert len(changes) > 100
        assert all(changes)
        assert meter.live["gradients_whole"] == meter.live["checkpoints"] == 0

    yield On(2, run)


def test_what_is_in_no_category_is_shown_beside_the_sum() -> None:
    """Sums by hand: an allocator's 900 bytes in tensors and 1,000 reserved; a process's 700; none known."""
    assert beside(800, {"resident": 5000, "allocated": 900, "reserved": 1000}) == {"other": 100, "fragmentation": 100}
    assert beside(600, {"resident": 700, "cgroup_limit": 10**9}) == {"other": 100}
    assert beside(600, {}) == {}
    model = onecopy.shard(nn.Linear(64, 64), 0)
    table = dict(line.split()[:2] for line in onecopy.meter(model).table().splitlines() if len(line.split()) > 1)
    counted, resident, other = (int(table[name].replace(",", "")) for name in ("sum", "resident", "other"))
    assert counted == 4 * (64 * 64 + 64)
    assert counted + other == resident


@pytest.mark.parametrize(
    "files, own, expected",
    [
        pytest.param({"memory.max": "max"}, "0::/", None, id="none"),
        pytest.param({"memory.max": "5000"}, "0::/docker/x", 5000, id="a container's root, and its path on the host"),
        pytest.param({"a/b/memory.max": "9000", "a/memory.max": "7000"}, "0::/a/b", 7000, id="the group around it"),
        pytest.param({"a/memory.max": "7000", "c/memory.max": "10"}, "0::/a/b", 7000, id="not another's"),
        pytest.param({"memory/a/memory.limit_in_bytes": "6000"}, "4:memory:/a\n3:cpu:/b\n0::/", 6000, id="version 1"),
        pytest.param({"memory/memory.limit_in_bytes": str(2**63 - 4096)}, "4:memory:/", None, id="none in version 1"),
        pytest.param({}, None, None, id="no control groups"),
    ],
)
def test_the_limit_of_the_control_group_is_found(
    files: dict[str, str], own: str | None, expected: int | None, tmp_path: Path
) -> None:
    """Oracle: the layout of cgroup v2 and v1 in the kernel's documentation."""
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text + "\n")
    if own is not None:
        (tmp_path / "own").write_text(own + "\n")
    assert cgroup_limit(tmp_path / "groups", tmp_path / "own") == expected


class _Storages:
    """The oracle of activations: distinct storages that autograd saves for a plain model, parameters left out."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._found: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._parameters:
            self._found[address] = tensor
        return tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._found.values())


def _profiled(rank: int, stage: int, folder: Path) -> tuple[int, int, dict[str, object]]:
    torch.manual_seed(0)
    plain = Net(4)
    saved = _Storages(plain)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        plain(_batch(rank)).backward()
    torch.manual_seed(0)
    model = onecopy.shard(Net(4), stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        with onecopy.profile(model) as seen:
            model(_batch(rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
    path = folder / f"rank-{rank}.json"
    seen.save(path, step=2)
    left = int(seen.memory[-1]["activations"])
    assert left == 0, "autograd has let go of everything"
    return saved.nbytes, int(max(sample["activations"] for sample in seen.memory)), json.loads(path.read_text())


@pytest.mark.parametrize("stage", [0, 1, 3])
@one_fork
def test_profile_sees_plain_pytorchs_activations_and_the_ledgers_bytes(stage: int, tmp_path: Path) -> Forked:
    """Oracles: storages saved for the plain model; the paper's volume 2Ψ or 3Ψ for the events' bytes."""
    psi = ROOT + 4 * BLOCK
    for expected, found, content in (yield On(2, _profiled, stage, tmp_path)):
        assert found == expected
        events = content["events"]
        assert isinstance(events, list)
        sent = sum(event["bytes"] for event in events)
        assert sent == pytest.approx((3 if stage == 3 else 2) * psi * 4 / 2, rel=0.01)
        assert all(event["start"] <= event["end"] for event in events)
        units = {event["unit"] for event in events if event["lane"] == "compute" and event["phase"] == "backward"}
        assert units == {"", *(f"blocks.{i}" for i in range(4))}
        assert (content["step"], content["stage"], content["ranks"]) == (2, stage, 2)


def _accumulated(rank: int, stage: int) -> tuple[int, int]:
    model = onecopy.shard(Net(4), stage, accumulate=3)
    meter = onecopy.meter(model)
    for _ in range(3):
        (model(_batch(rank)) / 3).backward()
    held = sum(p.grad.local.nbytes for p in model.parameters() if isinstance(p.grad, onecopy.SlicedTensor))
    return meter.live["gradients_sliced"], held


@pytest.mark.parametrize("stage", [2, 3])
@one_fork
def test_gradients_of_several_micro_batches_are_counted_once(stage: int) -> Forked:
    """Oracle: the slices in p.grad. Padding, less than 8 elements a bucket and rank, is counted too."""
    for counted, held in (yield On(2, _accumulated, stage)):
        assert held <= counted < held + 8 * 4 * 6


@pytest.mark.parametrize("stage", [0, 3])
@one_fork
def test_saving_and_loading_are_phases_with_a_peak(stage: int, tmp_path: Path) -> Forked:
    """Oracle: slices and AdamW's two moments, which a save between steps finds, in fp32."""

    def run(rank: int) -> dict[str, dict[str, int]]:
        torch.manual_seed(0)
        model = onecopy.shard(Net(2), stage)
        optimizer = torch.optim.AdamW(model.parameters())
        model(_batch(rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        meter = onecopy.meter(model)
        meter.reset_peaks()
        onecopy.save(tmp_path, model, optimizer)
        onecopy.load(tmp_path, model, optimizer)
        return dict(meter.peaks)

    peaks = (yield On(2, run))[0]
    assert set(peaks) == {"save", "load"}
    parameters = sum(p.numel() for p in Net(2).parameters()) / (1 if stage == 0 else 2)
    for peak in peaks.values():
        assert peak["parameters_sliced"] == pytest.approx(4 * parameters, rel=0.01)
        assert peak["optimizer"] == pytest.approx(8 * parameters, rel=0.01)
