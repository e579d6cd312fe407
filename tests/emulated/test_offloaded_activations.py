"""Activations offloaded to the host. Oracles: plain PyTorch in one process, and the device's own counters."""

from __future__ import annotations

import pytest
import torch

import onecopy
from models import TinyGPT, seeded
from on_device import run_on_device, the_device
from onecopy.activations import checkpoint
from onecopy.activations.kept import Store
from onecopy.activations.store import make_store
from onecopy.errors import UsageError
from onecopy.memory.store.movers import Movers
from onecopy.observe.ledger import Ledger
from onecopy.observe.meter import Meter
from training import run_clean, trains_like_one_process

pytestmark = pytest.mark.emulated

BYTES = 4 * 256


def _store() -> Store:
    ledger = Ledger()
    meter = Meter(ledger)
    return make_store("cpu", meter, Movers(meter, ledger))


class AddsInPlace(TinyGPT):
    """Changes what a block was given, once the block has returned; ``in_place`` False leaves that to other memory."""

    def __init__(self, in_place: bool) -> None:
        super().__init__(layers=3)
        self.in_place = in_place

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            h = block(x)
            if self.in_place:
                x += h
            else:
                x = x + h
        return self.head(self.norm(x))


def test_an_input_may_be_changed_in_place_once_its_unit_has_computed() -> None:
    def run(rank: int, device: torch.device) -> None:
        for stage in (0, 3):
            trains_like_one_process(
                rank,
                device,
                2,
                stage=stage,
                build=lambda: seeded(AddsInPlace, in_place=False),
                sharded=lambda: seeded(AddsInPlace, in_place=True),
                activations=onecopy.Activations(offload="cpu"),
            )

    run_clean(2, run)


def test_what_a_call_kept_is_fetched_ahead_while_the_call_after_it_computes() -> None:
    """Two tensors in each of three calls: the device holds those of the call that is fetched, and of the one before."""

    def run(rank: int, device: torch.device) -> None:
        store = _store()
        values = [torch.full((256,), float(i), device=device) for i in range(6)]
        kept = []
        for pair in range(3):
            kept.append([store.keep(values[2 * pair]), store.keep(values[2 * pair + 1])])
            store.end_call()
        values.clear()
        assert the_device().memory()[0] == 0
        for pair in (2, 1, 0):
            fetched = [one.fetch() for one in kept[pair]]
            assert the_device().memory()[0] == (4 if pair else 2) * BYTES
            assert [one.sum().item() for one in fetched] == [256.0 * 2 * pair, 256.0 * (2 * pair + 1)]
            del fetched
        # Of a graph that is kept, what has been fetched once is not fetched ahead again.
        assert kept[1][0].fetch().sum().item() == 512.0
        assert the_device().memory()[0] == 0

    run_clean(1, run)


def test_all_units_copy_on_one_pair_of_streams() -> None:
    """Oracle: the device's numbers of streams, which count up."""

    def run(rank: int, device: torch.device) -> tuple[int, int]:
        before = torch.Stream(device).stream_id
        trains_like_one_process(rank, device, 2, stage=3, activations=onecopy.Activations(offload="cpu"))
        return before, torch.Stream(device).stream_id

    for seen in run_on_device(2, run):
        before, after = seen.result
        # Out, back, those of the two groups, and the one that tells.
        assert after - before == 5


def test_an_input_that_its_own_unit_changes_in_place_is_an_error() -> None:
    """Its copy out may or may not have been taken then."""

    def run(rank: int, device: torch.device) -> None:
        call = checkpoint(lambda x: x.mul_(2).exp(), offload="cpu")
        with pytest.raises(UsageError, match="modified in place"):
            call(torch.ones(4, device=device, requires_grad=True) * 1)

    run_on_device(1, run)


def test_what_is_dropped_while_it_is_fetched_ahead_goes_in_order() -> None:
    def run(rank: int, device: torch.device) -> None:
        store = _store()
        kept = []
        for _ in range(2):
            kept.append(store.keep(torch.zeros(256, device=device)))
            store.end_call()
        kept[1].fetch()
        kept.clear()
        for _ in range(3):
            torch.zeros(256, device=device).add_(1)

    run_clean(1, run)
