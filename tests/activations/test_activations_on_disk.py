"""Activations in files: in the file of offloaded states, through their threads and their pool.

Oracles: the same run without offload, plain PyTorch, the kernel's table of open files, and closed forms of bytes.
"""

from __future__ import annotations

import errno
import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

import onecopy
from models import TinyGPT, seeded, token_batches
from onecopy import Activations, Offload
from onecopy.activations import checkpoint
from onecopy.activations.disk import OnDisk
from onecopy.errors import OffloadError
from onecopy.memory.store.movers import Movers
from onecopy.memory.store.pool import SLOTS
from onecopy.observe.ledger import Ledger
from onecopy.observe.meter import Meter
from onecopy.sharding.setup.api import engine_of
from oracle import assert_same_weights, gathered_weights, part, train
from ranks import run_ranks

BLOCK = 4096


def _store(directory: Path) -> tuple[OnDisk, Movers, Meter, Ledger]:
    ledger = Ledger()
    meter = Meter(ledger)
    movers = Movers(meter, ledger)
    return OnDisk(movers.file(directory), movers.pool, meter), movers, meter, ledger


def _files_in(directory: Path) -> list[str]:
    """Of this process, nameless ones too: the kernel shows where they were made."""
    found = [os.readlink(f"/proc/self/fd/{handle}") for handle in os.listdir("/proc/self/fd") if _is_open(handle)]
    return [name for name in found if name.startswith(str(directory))]


def _is_open(handle: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{handle}")


def test_states_and_activations_share_a_file_its_threads_and_a_pool(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        batches = [part(batch, rank, 2) for batch in token_batches(3)]
        plain = onecopy.shard(seeded(TinyGPT, layers=3), 3)
        train(plain, AdamW(plain.parameters(), lr=1e-2), batches)
        before = threading.active_count()
        model = onecopy.shard(
            seeded(TinyGPT, layers=3),
            3,
            offload=Offload(tmp_path, tmp_path),
            activations=Activations(offload=tmp_path / "."),
        )
        train(model, AdamW(model.parameters(), lr=1e-2), batches)
        assert_same_weights(gathered_weights(model), gathered_weights(plain), atol=0)
        assert len(_files_in(tmp_path)) == 1
        assert threading.active_count() - before <= 4
        stores, meter = engine_of(model).stores, onecopy.meter(model)
        assert stores is not None
        assert stores.pool._lent == 0
        # A block's input, kept for each of three blocks: rows of a rank, its tokens but the last, width, in fp32.
        rows, length = batches[0][0].shape
        kept = 3 * rows * (length - 1) * model.tokens.weight.shape[1] * 4
        assert meter.off_device_peak["checkpoints"] == kept
        assert meter.off_device["checkpoints"] == 0
        step = onecopy.ledger(model).last_step
        assert step is not None
        # The parameters' reads are in these phases too, but no other writes are in forward.
        blocks = 3 * -(-kept // 3 // BLOCK) * BLOCK
        assert step.bytes_sent("to disk", "forward") == blocks
        assert step.bytes_sent("from disk", "backward") >= kept

    run_ranks(2, run)
    assert list(tmp_path.iterdir()) == []


def test_memory_is_three_of_the_largest_however_many_are_kept(tmp_path: Path) -> None:
    """Ten tensors of 1 MiB in five calls. Oracle: the values; the pool's limit, and that the meter has counted it."""

    def run(_: int) -> None:
        store, movers, meter, ledger = _store(tmp_path)
        values = [torch.full((2**18,), float(i)) for i in range(10)]
        kept = []
        for pair in range(5):
            kept.append([store.keep(values[2 * pair]), store.keep(values[2 * pair + 1])])
            store.end_call()
        assert meter.off_device["checkpoints"] == 10 * 2**20
        for pair in reversed(range(5)):
            for one, value in zip(kept.pop(), values[2 * pair : 2 * pair + 2], strict=True):
                assert torch.equal(one.fetch(), value)
        one = None
        gc.collect()
        assert max(peak["communication"] for peak in meter.peaks.values()) == SLOTS * 2**20
        assert (meter.off_device["checkpoints"], movers.pool._lent) == (0, 0)
        assert ledger.total.bytes_sent("to disk") == ledger.total.bytes_sent("from disk") == 10 * 2**20

    run_ranks(1, run, group=False)


def test_room_of_what_was_fetched_is_used_again(tmp_path: Path) -> None:
    """Oracle: the kernel's size of the file after one step and after ten."""

    def run(_: int) -> None:
        store, movers, _, _ = _store(tmp_path)
        sizes = []
        for _ in range(10):
            kept = [store.keep(torch.ones(3000)) for _ in range(4)]
            store.end_call()
            assert all(torch.equal(one.fetch(), torch.ones(3000)) for one in reversed(kept))
            kept.clear()
            gc.collect()
            sizes.append(os.fstat(movers.file(tmp_path)._handle).st_size)
        assert sizes == [4 * 3 * BLOCK] * 10

    run_ranks(1, run, group=False)


def test_where_others_have_the_pool_bytes_move_without_it(tmp_path: Path) -> None:
    """A step that computes its gradients while pages are at hand has all of the pool."""

    def run(_: int) -> None:
        store, movers, _, _ = _store(tmp_path)
        other = movers.pool.take(2**20)
        values = [torch.arange(3 * BLOCK, dtype=torch.float32), torch.arange(5), torch.empty(0, dtype=torch.bfloat16)]
        kept = [store.keep(value) for value in values]
        store.end_call()
        for one, value in zip(kept, values, strict=True):
            for _ in range(2):
                assert torch.equal(one.fetch(), value)
        movers.pool.give(other)
        assert movers.pool._lent == 0

    run_ranks(1, run, group=False)


def test_what_is_dropped_gives_its_memory_and_room_back(tmp_path: Path) -> None:
    """In the middle of being written, and of being fetched ahead."""

    def run(_: int) -> None:
        store, movers, meter, _ = _store(tmp_path)
        for _ in range(3):
            kept = []
            for _ in range(2):
                kept.append(store.keep(torch.ones(2**18)))
                store.end_call()
            kept[1].fetch()
            kept.clear()
            store.keep(torch.ones(2**18))
        gc.collect()
        store.keep(torch.ones(1)).fetch()
        movers.file(tmp_path)._threads.shutdown(wait=True)
        assert (movers.pool._lent, meter.off_device["checkpoints"]) == (0, 0)

    run_ranks(1, run, group=False)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_disk_that_fails_is_named_and_gives_its_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def run(_: int) -> str:
        ledger = Ledger()
        meter = Meter(ledger)
        function: Any = checkpoint(torch.exp, offload=tmp_path, meter=meter, ledger=ledger)
        x = torch.ones(2**16, requires_grad=True)
        function(x * 1).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, x.detach().exp())

        def failing(*given: Any) -> int:
            raise OSError(errno.EIO, "Input/output error")

        def train_once() -> Tensor:
            loss: Tensor = function(x * 1).sum()
            loss.backward()
            return loss

        monkeypatch.setattr(os, call, failing)
        with pytest.raises(OffloadError, match="Input/output error; give another directory") as caught:
            train_once()
        message = str(caught.value)
        del caught
        gc.collect()
        monkeypatch.undo()
        assert meter.off_device["checkpoints"] == 0
        train_once()
        return message

    (message,) = run_ranks(1, run, group=False)
    assert str(tmp_path) in message
