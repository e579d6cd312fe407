"""save and load. Oracle: the run that never stopped, and the whole-batch twin in one process of plain PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

import onecopy
from models import Stack, TinyGPT, seeded, token_batches, vector_batches
from one_fork import Forked, On, one_fork
from onecopy.checkpoint import storage
from onecopy.errors import CheckpointError, SettingsError, UsageError
from oracle import assert_same_weights, gathered_weights, mean_over_ranks, part, whole_weights
from ranks import run_ranks

every_stage = pytest.mark.parametrize("stage, num_ranks", [(0, 2), (1, 3), (2, 2), (3, 3)])


class Dropped(Stack):
    """A model that draws random numbers, one in Python as well."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + nn.functional.dropout(block(x), 0.3)
        return nn.functional.mse_loss(self.head(x), y) * random.uniform(0.9, 1.1)


class Job:
    """A training run with everything that has a state."""

    def __init__(self, model: nn.Module, accumulate: int = 1, scale: bool = False) -> None:
        self.model = model
        decayed = [p for p in model.parameters() if p.ndim > 1]
        other = [p for p in model.parameters() if p.ndim <= 1]
        self.optimizer = AdamW([{"params": decayed}, {"params": other, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-2)
        self.scheduler = CosineAnnealingLR(self.optimizer, 8)
        self.scaler = torch.amp.GradScaler("cpu", enabled=scale, init_scale=2.0**10, growth_interval=2)
        self.accumulate = accumulate
        self.position = 0

    def parts(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}

    def run(self, batches: Sequence[tuple[Tensor, ...]], steps: int, mine: Callable[[Any], Any]) -> list[float]:
        losses = []
        for _ in range(steps):
            for batch in batches[self.position : self.position + self.accumulate]:
                loss = self.model(*mine(batch))
                self.scaler.scale(loss / self.accumulate).backward()
                losses.append(loss.item())
            self.position += self.accumulate
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return losses

    def save(self, directory: Path, **more: Any) -> Path:
        return onecopy.save(
            directory, self.model, **self.parts(), extra={"position": self.position}, step=self.position, **more
        ).wait()

    def load(self, directory: Path) -> onecopy.Loaded:
        loaded = onecopy.load(directory, self.model, **self.parts())
        self.position = loaded.extra["position"]
        return loaded


# --- the same number of ranks: bit for bit


def _stop_and_go(rank: int, num_ranks: int, stage: int, directory: Path, settings: dict[str, Any]) -> None:
    accumulate, precision, background = settings["accumulate"], settings["precision"], settings["background"]
    batches = vector_batches(6 * accumulate)

    def start() -> Job:
        model = onecopy.shard(seeded(Dropped), stage, accumulate=accumulate, precision=precision)
        return Job(model, accumulate, scale=precision == "fp16")

    def mine(batch: Any) -> Any:
        return part(batch, rank, num_ranks)

    torch.manual_seed(rank)
    random.seed(rank)
    job = start()
    job.run(batches, 2, mine)
    job.save(directory, keep=2, background=background)
    job.run(batches, 2, mine)
    saving = onecopy.save(
        directory, job.model, **job.parts(), extra={"position": job.position}, rank_extra=rank, background=background
    )
    expected = job.run(batches, 2, mine)
    weights = gathered_weights(job.model)
    path = saving.wait()
    assert (saving.copied > 0) == background

    torch.manual_seed(99)
    random.seed(99)
    job = start()
    loaded = job.load(directory)
    assert (loaded.path, loaded.step, loaded.rank_extra, loaded.skipped) == (path, 2 * accumulate + 1, rank, ())
    assert job.run(batches, 2, mine) == expected
    assert_same_weights(gathered_weights(job.model), weights, atol=0)


SETTINGS = [
    {"accumulate": 1, "precision": None, "background": False},
    {"accumulate": 3, "precision": None, "background": True},
    {"accumulate": 1, "precision": "fp16", "background": False},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "accumulation, background", "fp16, scaler"])
@every_stage
@one_fork
def test_resumed_run_is_the_one_that_never_stopped(
    stage: int, num_ranks: int, settings: dict[str, Any], tmp_path: Path
) -> Forked:
    """Losses and weights, with dropout, two groups, a scheduler and clipping."""
    yield On(num_ranks, _stop_and_go, num_ranks, stage, tmp_path / "c", settings)


# --- any other number of ranks, stage and kind of model


def _wrap(model: nn.Module, kind: str) -> nn.Module:
    if kind == "plain":
        return model
    if kind == "DDP":
        return DistributedDataParallel(model)
    if kind == "fully_shard":
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        fully_shard(model)
        return model
    if kind == "replicated":
        mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return onecopy.shard(model, 3, mesh=mesh)
    return onecopy.shard(model, int(kind[-1]))


def _weights(model: nn.Module) -> dict[str, Tensor]:
    if any(isinstance(p, onecopy.SlicedTensor) for p in model.parameters()):
        return gathered_weights(model)
    whole = {n: p.detach() for n, p in model.named_parameters()}
    full = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in whole.items()}
    return {n.removeprefix("module."): p.clone() for n, p in full.items()}


def _train_and_save(rank: int, num_ranks: int, kind: str, directory: Path) -> None:
    job = Job(_wrap(seeded(TinyGPT), kind))
    job.run(token_batches(4), 2, lambda batch: part(batch, rank, num_ranks))
    job.save(directory)


def _load_and_train(rank: int, num_ranks: int, kind: str, directory: Path) -> tuple[list[float], dict[str, Tensor]]:
    # Weights that differ from those saved, everywhere.
    model = seeded(TinyGPT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    job = Job(_wrap(model, kind))
    job.optimizer.param_groups[0]["lr"] = 7.0
    assert job.load(directory).step == 2
    losses = job.run(token_batches(4), 2, lambda batch: part(batch, rank, num_ranks))
    return mean_over_ranks(losses), _weights(job.model)


def _twin(rank: int) -> tuple[list[float], dict[str, Tensor]]:
    job = Job(seeded(TinyGPT))
    job.run(token_batches(4), 2, lambda batch: batch)
    losses = job.run(token_batches(4), 2, lambda batch: batch)
    return losses, whole_weights(job.model)


@pytest.fixture(scope="module")
def twin() -> tuple[list[float], dict[str, Tensor]]:
    return run_ranks(1, _twin, group=False)[0]  # type: ignore[no-any-return]


CHANGES = [
    ("stage 3", 3, "stage 3", 2),
    ("stage 3", 2, "stage 1", 4),
    ("stage 0", 2, "stage 3", 3),
    ("stage 2", 3, "stage 0", 2),
    ("replicated", 4, "stage 3", 1),
    ("stage 1", 1, "replicated", 4),
    ("stage 3", 3, "plain", 1),
    ("plain", 1, "stage 2", 3),
    ("stage 3", 3, "DDP", 2),
    ("DDP", 2, "stage 3", 3),
    ("stage 1", 2, "fully_shard", 3),
    ("fully_shard", 3, "stage 3", 2),
]


@pytest.mark.parametrize("saver, save_ranks, loader, load_ranks", CHANGES)
@one_fork
def test_goes_on_elsewhere_like_the_whole_batch_twin(
    twin: Any, saver: str, save_ranks: int, loader: str, load_ranks: int, tmp_path: Path
) -> Forked:
    """To fp32 rounding; tied weights, groups with their own learning rates, the schedule."""
    yield On(save_ranks, _train_and_save, save_ranks, saver, tmp_path, group=save_ranks > 1)
    results = yield On(load_ranks, _load_and_train, load_ranks, loader, tmp_path, group=load_ranks > 1)
    for losses, weights in results:
        assert losses == pytest.approx(twin[0], rel=1e-6, abs=0)
        assert_same_weights(weights, twin[1], atol=2e-6)


# --- pieces and shares


def _save_pieces(rank: int, kind: str, directory: Path, piece: int) -> None:
    storage.PIECE = piece  # type: ignore[misc]
    job = Job(_wrap(seeded(TinyGPT), kind))
    job.run(token_batches(1), 1, lambda batch: part(batch, rank, 4))
    job.save(directory)


@pytest.mark.parametrize("kind", ["DDP", "stage 0", "replicated"])
@one_fork
def test_copies_are_written_once_and_the_work_is_shared(kind: str, tmp_path: Path) -> Forked:
    """Oracle: the bytes of model and Adam states, counted by hand; four ranks write them, each about a quarter."""
    yield On(4, _save_pieces, kind, tmp_path, 256)
    (path,) = tmp_path.glob("step-*")
    metadata = storage.Reader(path).read_metadata()
    saved = metadata.state_dict_metadata
    parameters = sum(p.numel() for p in TinyGPT().parameters())
    tensors = {k: m for k, m in saved.items() if not k.startswith("ranks.") and k != "model.head.weight"}
    assert sum(chunk.sizes.numel() for m in tensors.values() for chunk in m.chunks) == 3 * parameters
    by_rank = dict.fromkeys(range(4), 0)
    for index, info in metadata.storage_data.items():
        if index.fqn in tensors:
            sizes = next(chunk.sizes for chunk in tensors[index.fqn].chunks if chunk.offsets == index.offset)
            assert sizes.numel() * 4 <= 256
            by_rank[int(info.relative_path.split("_")[2])] += sizes.numel()
    assert sum(by_rank.values()) == 3 * parameters
    assert max(by_rank.values()) < 1.25 * 3 * parameters / 4
    # The tied head's bytes are the embedding's.
    head, embedding = (
        {index.offset: info for index, info in metadata.storage_data.items() if index.fqn == f"model.{name}.weight"}
        for name in ("head", "tokens")
    )
    assert head == embedding


# --- what cannot work


def _two_schedulers(rank: int, directory: Path) -> None:
    model = onecopy.shard(nn.Linear(4, 4), 2)
    optimizers = [AdamW([model.weight], lr=1.0), AdamW([model.bias], lr=2.0)]
    schedulers = [CosineAnnealingLR(optimizer, length) for optimizer, length in zip(optimizers, (4, 8), strict=True)]
    model(torch.ones(2, 4)).sum().backward()
    for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
        optimizer.step()
        scheduler.step()
    rates = [scheduler.get_last_lr() for scheduler in schedulers]
    onecopy.save(directory, model, optimizers, scheduler=schedulers)
    fresh = [CosineAnnealingLR(optimizer, length) for optimizer, length in zip(optimizers, (4, 8), strict=True)]
    onecopy.load(directory, model, optimizers, scheduler=fresh)
    assert [(scheduler.get_last_lr(), scheduler.last_epoch) for scheduler in fresh] == [(rate, 1) for rate in rates]
    with pytest.raises(CheckpointError, match="scheduler= must have as many as were saved, 2; found 1"):
        onecopy.load(directory, model, optimizers, scheduler=fresh[0])


@one_fork
def test_each_of_several_optimizers_has_its_scheduler_back(tmp_path: Path) -> Forked:
    """As Muon and AdamW train together. Oracle: the schedulers that were saved."""
    yield On(2, _two_schedulers, tmp_path / "c")


def _errors(rank: int, directory: Path) -> None:
    model = onecopy.shard(seeded(Stack), 1, accumulate=2)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"keep": 0}, "keep must be at least 1"),
        ({"step": -1}, "step must be a whole number, 0 or more"),
        ({"step": 1.5}, "step must be a whole number, 0 or more"),
    ]
    for settings, words in wrong:
        with pytest.raises(SettingsError, match=words):
            onecopy.save(directory, model, **settings)
    with pytest.raises(UsageError, match="extra, or the state of the scheduler or scaler, holds a value"):
        onecopy.save(directory, model, extra={"path": Path("x")})
    with pytest.raises(UsageError, match="on rank 1: rank_extra holds a value"):
        onecopy.save(directory, model, rank_extra=(lambda: 1) if rank == 1 else None)
    with pytest.raises(UsageError, match=r"none of the model's"):
        onecopy.save(directory, model, SGD([nn.Parameter(torch.zeros(7))], lr=1.0))
    model(*part(vector_batches(1)[0], rank, 2)).backward()
    with torch.device("meta"), pytest.raises(UsageError, match=r"on the meta device.*materialize"):
        onecopy.load(directory, onecopy.shard(Stack(), 3))
    assert not directory.exists()

    model(*part(vector_batches(1)[0], rank, 2)).backward()
    optimizer.step()
    onecopy.save(directory, model, optimizer)
    wider = onecopy.shard(Stack(layers=4), 3)
    with pytest.raises(CheckpointError, match=r"(?s)does not fit.*only in the model: blocks\.3\.0\.weight\n"):
        onecopy.load(directory, wider)
    with pytest.raises(CheckpointError, match=r"blocks\.0\.0\.weight: \(20, 10\) in the checkpoint, \(24, 12\)"):
        onecopy.load(directory, onecopy.shard(Stack(width=12), 3))
    smaller = onecopy.shard(Stack(layers=2), 3)
    with pytest.raises(CheckpointError, match=r"only in the checkpoint: blocks\.2\.0\.weight"):
        onecopy.load(directory, smaller)
    onecopy.load(directory, smaller, strict=False)
    onecopy.load(directory, wider, strict=False)
    assert_same_weights(
        {name: weight for name, weight in gathered_weights(wider).items() if ".3." not in name},
        gathered_weights(model),
        atol=0,
    )
    with pytest.raises(CheckpointError, match="has the states of AdamW, which SGD cannot continue"):
        onecopy.load(directory, model, SGD(model.parameters(), lr=1.0))
    onecopy.save(directory, model)
    with pytest.raises(CheckpointError, match="no optimizer was saved with it"):
        onecopy.load(directory, model, optimizer)


@one_fork
def test_what_cannot_work_is_an_error_that_says_what_can(tmp_path: Path) -> Forked:
    yield On(2, _errors, tmp_path / "c")


def _groups(rank: int, directory: Path) -> None:
    model = onecopy.shard(seeded(Stack), 3)
    first, *others = list(model.parameters())
    saved = AdamW([{"params": others, "lr": 1.0}, {"params": [first], "lr": 2.0, "betas": (0.5, 0.6)}])
    onecopy.save(directory, model, saved)
    # The other way round, in more groups, with another way to compute.
    found = AdamW([{"params": [first]}, {"params": others[3:]}, {"params": others[:3][::-1]}], lr=9.0, fused=True)
    onecopy.load(directory, model, found)
    assert [group["lr"] for group in found.param_groups] == [2.0, 1.0, 1.0]
    assert found.param_groups[0]["betas"] == (0.5, 0.6)
    assert all(group["fused"] for group in found.param_groups)
    mixed = AdamW(model.parameters(), lr=9.0)
    with pytest.raises(CheckpointError, match=r"are in one group of this optimizer, but were saved with (lr|betas) ="):
        onecopy.load(directory, model, mixed)
    assert mixed.param_groups[0]["lr"] == 9.0


@one_fork
def test_groups_are_matched_by_the_names_of_their_parameters(tmp_path: Path) -> Forked:
    yield On(2, _groups, tmp_path)


def _background(rank: int, directory: Path) -> None:
    model = onecopy.shard(Stack(width=100), 3)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    first = onecopy.save(directory / "c", model, optimizer, background=True)
    second = onecopy.save(directory / "c", model, optimizer, background=True)
    # One copy at a time: the second save waited for the first.
    assert first.done
    assert [first.wait().name, second.wait().name] == ["step-00000001", "step-00000002"]
    slices = sum(p.local.nbytes for p in model.parameters())
    # And the states of the random number generators.
    assert slices <= first.copied < slices + 25_000 < 1.2 * slices


@one_fork
def test_background_saves_hold_one_copy_of_the_ranks_share(tmp_path: Path) -> Forked:
    yield On(2, _background, tmp_path)


def _load_again(rank: int, directory: Path) -> None:
    model = onecopy.shard(seeded(Stack), 3)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    batch = part(vector_batches(1)[0], rank, 2)

    def step() -> float:
        loss: Tensor = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step()
    onecopy.save(directory, model, optimizer)
    expected = [step(), step()]
    memory = [state["exp_avg"].local.data_ptr() for state in optimizer.state.values()]
    onecopy.load(directory, model, optimizer)
    assert [state["exp_avg"].local.data_ptr() for state in optimizer.state.values()] == memory
    assert [step(), step()] == expected


@one_fork
def test_a_run_that_goes_back_reads_into_the_memory_that_it_has(tmp_path: Path) -> Forked:
    yield On(2, _load_again, tmp_path)
