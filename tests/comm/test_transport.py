"""Transports: right values, constant staging memory, and independence of timing. Oracle: torch on stacked tensors."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import onecopy
from one_fork import Forked, On, one_fork
from onecopy.comm import mesh as mesh_file
from onecopy.comm.collective import Collective, Label, Posted, Program
from onecopy.comm.cross_memory import SWITCH, Fetch, Neighbours, find_neighbours
from onecopy.comm.direct_exchange import DirectExchange
from onecopy.comm.mailbox import Board, Mailbox
from onecopy.comm.native_calls import NativeCalls
from onecopy.comm.outgoing import Flat, Outgoing
from onecopy.comm.remote_memory import Window
from onecopy.comm.transport import Lengths, Peers, Transport
from onecopy.errors import CollectiveError, CollectiveTimeout
from onecopy.memory.staging import Staging
from onecopy.observe.ledger import Ledger


def _exchange(own: object) -> list[object]:
    objects: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, own)
    return objects


def _peers(near: bool = False, limit: float = 20.0) -> Peers:
    os.environ[SWITCH] = "1"
    group = dist.group.WORLD
    assert group is not None
    neighbours = (
        find_neighbours(dist.get_rank(), range(dist.get_world_size()), _exchange, limit) if near else Neighbours()
    )
    return Peers(group, dist.get_rank(), tuple(range(dist.get_world_size())), neighbours)


def _run(program: Program) -> None:
    Collective(program, Label("test", "", "shard"), 0, Ledger()).finish()


def _data(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _collectives(rank: int, make: str, dtype: torch.dtype, limit: int) -> dict[str, Tensor]:
    staging = Staging(limit)
    transport: Transport = NativeCalls(staging, averages=False) if make == "native" else DirectExchange(staging)
    peers = _peers(near=make == "memory")
    assert bool(peers.neighbours.mailboxes) == (make == "memory")
    size, numel = peers.size, 240
    own = _data(rank, numel, dtype)
    part = slice(rank * numel // size, (rank + 1) * numel // size)
    gathered = torch.zeros(numel, dtype=dtype)
    _run(transport.all_gather(peers, own[part], gathered, 1))
    out = torch.empty(numel // size)
    _run(transport.reduce_scatter(peers, Flat(own.clone(), dtype), out, 2))
    reduced = own.clone()
    _run(transport.all_reduce(peers, Flat(reduced, dtype), reduced, 4))
    widened = torch.empty(numel)
    _run(transport.all_reduce(peers, Flat(own.clone(), dtype), widened, 4))
    scattered = torch.empty(numel // size, dtype=dtype)
    _run(transport.scatter(peers, own.clone(), scattered, 6))
    most = torch.tensor([float(rank), -float(rank)])
    _run(transport.combine(peers, most, True, 7))
    return {
        "all_gather": gathered,
        "reduce_scatter": out,
        "all_reduce": reduced,
        "all_reduce, wider": widened,
        "scatter": scattered,
        "max": most,
    }


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "make, dtype, limit",
    [
        ("direct", torch.float32, 2**20),
        ("direct", torch.float32, 64),
        ("direct", torch.bfloat16, 2**20),
        ("direct", torch.bfloat16, 64),
        ("memory", torch.float32, 2**20),
        ("memory", torch.float32, 64),
        ("memory", torch.bfloat16, 2**20),
        ("memory", torch.bfloat16, 1),
        ("native", torch.float32, 2**20),
        ("native", torch.float32, 64),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
@one_fork
def test_collectives_equal_torch_on_all_ranks_data(num_ranks: int, make: str, dtype: torch.dtype, limit: int) -> Forked:
    data = [_data(rank, 240, dtype) for rank in range(num_ranks)]
    mean = torch.stack([d.double() for d in data]).mean(0)
    # fp32 sums of N terms; bf16 results are rounded once, at the end.
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 1e-6}
    for rank, got in enumerate((yield On(num_ranks, _collectives, make, dtype, limit))):
        part = slice(rank * 240 // num_ranks, (rank + 1) * 240 // num_ranks)
        owners = torch.arange(240) * num_ranks // 240
        assert torch.equal(got["all_gather"], torch.stack(data)[owners, torch.arange(240)])
        torch.testing.assert_close(got["reduce_scatter"].double(), mean[part], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(got["all_reduce"].double(), mean, **tolerance)
        torch.testing.assert_close(got["all_reduce, wider"].double(), mean, **tolerance)
        assert torch.equal(got["all_reduce, wider"], got["all_reduce"].float())
        assert torch.equal(got["scatter"], data[0][part])
        assert got["max"].tolist() == [num_ranks - 1.0, 0.0]


_RAGGED = {2: (16, 224), 3: (8, 200, 32), 4: (8, 120, 104, 8)}
"""Slices of different lengths; one is the rank's padding alone."""


def _ragged(rank: int, near: bool, dtype: torch.dtype, limit: int) -> dict[str, Tensor]:
    transport = DirectExchange(Staging(limit))
    peers = _peers(near=near)
    lengths = _RAGGED[peers.size]
    own = _data(rank, 240, dtype)
    gathered = torch.zeros(240, dtype=dtype)
    _run(transport.all_gather(peers, own.split(lengths)[rank], gathered, 1, lengths))
    out = torch.empty(lengths[rank])
    _run(transport.reduce_scatter(peers, Flat(own.clone(), dtype), out, 2, lengths))
    scattered = torch.empty(lengths[rank], dtype=dtype)
    _run(transport.scatter(peers, own.clone(), scattered, 6, lengths))
    return {"all_gather": gathered, "reduce_scatter": out, "scatter": scattered}


@pytest.mark.parametrize("near, limit", [(False, 2**20), (False, 400), (True, 2**20), (True, 400), (True, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@one_fork
def test_slices_may_differ_in_length(num_ranks: int, dtype: torch.dtype, near: bool, limit: int) -> Forked:
    """Oracle: all ranks' data in one process; limits below the whole send it in pieces, which change no bit."""
    lengths = _RAGGED[num_ranks]
    data = [_data(rank, 240, dtype) for rank in range(num_ranks)]
    total = data[0].float()
    for term in data[1:]:
        total = total + term.float()
    mean = (total * (1.0 / num_ranks)).split(lengths)
    for rank, got in enumerate((yield On(num_ranks, _ragged, near, dtype, limit))):
        expected = torch.cat([d.split(lengths)[place] for place, d in enumerate(data)])
        assert torch.equal(got["all_gather"], expected)
        assert torch.equal(got["reduce_scatter"], mean[rank])
        assert torch.equal(got["scatter"], data[0].split(lengths)[rank])


@given(
    lengths=st.lists(st.integers(1, 60).map(lambda n: 8 * n), min_size=1, max_size=6),
    more=st.integers(0, 3),
    limit=st.integers(1, 4000),
)
def test_ragged_pieces_cover_every_slice_once_within_the_limit(lengths: list[int], more: int, limit: int) -> None:
    staging = Staging(limit)
    with staging.borrow_ragged(tuple(lengths), more, torch.float32, torch.device("cpu")) as loan:
        for place, numel in enumerate(lengths):
            spans = [loan.span(place, number) for number in loan.pieces]
            assert [stop for _, stop in spans][-1] == numel
            assert [start for start, _ in spans] == [0, *[stop for _, stop in spans][:-1]]
        for number in loan.pieces:
            rows = loan.rows(number)
            assert len(rows) == len(lengths) + more
            longest = max(stop - start for start, stop in (loan.span(p, number) for p in range(len(lengths))))
            assert all(len(row) >= longest for row in rows[len(lengths) :])
        # The least that a piece holds of each row is 16 bytes, in either of two banks.
        least = 2 * (len(lengths) + more) * 32
        assert sum(bank.nbytes for bank in loan.banks) <= max(limit, least)


@one_fork
def test_direct_exchange_gives_the_same_bits_on_every_rank_and_in_every_run() -> Forked:
    first = yield On(4, _collectives, "direct", torch.float32, 2**20)
    again = yield On(4, _collectives, "direct", torch.float32, 64)
    for got in (*first, *again):
        assert torch.equal(got["all_reduce"], first[0]["all_reduce"])


def test_staging_memory_is_bounded_above_and_not_padded_up() -> None:
    grown: list[int] = []
    staging = Staging(limit=1024, on_change=grown.append)
    numel = 10**6 + 8
    with staging.borrow(3, numel, torch.float32, torch.device("cpu")) as large:
        assert sum(bank.nbytes for bank in large.banks) == grown[0] <= 1024
        # 1024 // (2 banks × 3 rows × 4 bytes), down to a multiple of 16 bytes.
        assert (len(large.banks), large.columns) == (2, 40)
        assert large.piece(0).shape == (3, 40)
        assert large.piece(0).data_ptr() == large.piece(2).data_ptr() != large.piece(1).data_ptr()
        assert large.pieces[-1] == (10**6, numel)
        assert large.piece(len(large.pieces) - 1).shape == (3, 8)
    grown.clear()
    small = Staging(limit=2**30, on_change=grown.append)
    with small.borrow(1, 16, torch.float32, torch.device("cpu")) as whole:
        assert whole.pieces == [(0, 16)]
        assert grown == [64, 64]  # for the two reduces that may be under way


def test_staging_lends_the_same_memory_again() -> None:
    staging = Staging(limit=4096)
    seen = set()
    for _ in range(5):
        with staging.borrow(1, 100, torch.float32, torch.device("cpu")) as loan:
            seen.add(loan.piece(0).data_ptr())
    assert len(seen) == 1


class _Late:
    """A message that completes only when it has been waited for, and late."""

    def __init__(self, posted: Posted) -> None:
        self._posted = posted

    def wait(self) -> object:
        time.sleep(0.002)
        return self._posted.work.wait()


class DelayedExchange(DirectExchange):
    """Posts nothing until the first wait, then late: whoever reuses a buffer too early gets wrong numbers."""

    def _delay(self, program: Program) -> Program:
        yield []
        try:
            while True:
                yield [Posted(_Late(item), item.peer) for item in next(program)]
        except StopIteration as end:
            return end.value

    def all_gather(self, peers: Peers, mine: Tensor, whole: Tensor, tag: int, lengths: Lengths = None) -> Program:
        return self._delay(super().all_gather(peers, mine, whole, tag, lengths))

    def reduce_scatter(
        self, peers: Peers, outgoing: Outgoing, out: Tensor, tag: int, lengths: Lengths = None
    ) -> Program:
        return self._delay(super().reduce_scatter(peers, outgoing, out, tag, lengths))


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())))


def _train(rank: int, stage: int, how: str, batch: Tensor) -> list[Tensor]:
    model = _mlp()
    if how == "sockets":
        os.environ[SWITCH] = "0"
    if how == "delayed":
        mesh_file.transport_for = lambda group, device, staging: DelayedExchange(staging)
    if rank is not None:
        onecopy.shard(model, stage)
        batch = batch.chunk(2)[rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for _ in range(4):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with onecopy.gathered(model):
        return [p.detach().clone() for p in model.parameters()]


def _plain(batch: Tensor) -> Iterator[Tensor]:
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for _ in range(4):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return iter([p.detach() for p in model.parameters()])


@pytest.mark.parametrize("how", ["delayed", "memory", "sockets"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@one_fork
def test_way_and_time_of_messages_change_nothing(stage: int, how: str) -> Forked:
    """A buffer reused while a late collective reads it would give every layer the last one's gradient.

    Oracle: one process on the whole batch.
    """
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    expected = list(_plain(batch))
    for weights in (yield On(2, _train, stage, how, batch)):
        for got, want in zip(weights, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def _offer_other_sizes(rank: int) -> str:
    peers, transport = _peers(near=True), DirectExchange(Staging())
    mine = torch.zeros(4 + 4 * rank)
    program = transport.all_gather(peers, mine, torch.zeros(2 * len(mine)), 1)
    with pytest.raises(CollectiveError) as caught:
        Collective(program, Label("all_gather", "block", "shard"), 0, Ledger()).finish()
    return str(caught.value.__cause__)


@one_fork
def test_collectives_that_do_not_belong_together_are_refused_where_memory_is_read() -> Forked:
    small, large = yield On(2, _offer_other_sizes)
    assert "16 bytes were expected; found 32" in small
    assert "32 bytes were expected; found 16" in large


def _leave_before_reading(rank: int) -> str:
    peers, transport = _peers(near=True, limit=1.0), DirectExchange(Staging())
    if rank == 1:
        time.sleep(1.5)
        return ""
    program = transport.all_gather(peers, torch.zeros(4), torch.zeros(8), 1)
    with pytest.raises(CollectiveTimeout) as caught:
        Collective(program, Label("all_gather", "block", "shard"), 0, Ledger()).finish()
    return str(caught.value)


@one_fork
def test_a_neighbour_that_never_answers_is_named() -> Forked:
    said, _ = yield On(2, _leave_before_reading)
    assert "all_gather of unit 'block'" in said
    assert "no answer from rank 1" in said


def _neighbours(rank: int, *, switched_off: int | None) -> list[int]:
    os.environ[SWITCH] = "0" if rank == switched_off else "1"
    return sorted(find_neighbours(rank, range(dist.get_world_size()), _exchange, 1.0).mailboxes)


@one_fork
def test_neighbours_are_mutual_and_can_be_switched_off() -> Forked:
    assert (yield On(3, partial(_neighbours, switched_off=None))) == [[1, 2], [0, 2], [0, 1]]
    assert (yield On(3, partial(_neighbours, switched_off=1))) == [[2], [], [0]]


def test_memory_is_read_or_refused() -> None:
    """Oracle: the bytes themselves; and a process id that the kernel never gives out."""
    source, target = torch.arange(1000), torch.zeros(1000, dtype=torch.int64)
    assert Window(os.getpid(), source.data_ptr(), target.data_ptr(), source.nbytes).read()
    assert torch.equal(source, target)
    assert not Window(2**30, source.data_ptr(), target.data_ptr(), source.nbytes).read()


def _exchange_notes(rank: int, count: int) -> list[tuple[int, ...]]:
    """Rank 0 writes far more notes than a ring holds, of two subjects; rank 1 asks for the second's first."""
    mailbox = find_neighbours(rank, range(dist.get_world_size()), _exchange, 10.0).mailboxes[1 - rank]
    if rank == 0:
        for number in range(count):
            mailbox.write((number % 2, number, -number, 5), 10.0)
        mailbox.wait(mailbox.ask(7), 10.0)
        return []
    tickets = [mailbox.ask(subject) for subject in (1, 0) for _ in range(count // 2)]
    # Whoever waits out of turn gets what it lined up for.
    last = mailbox.wait(tickets[-1], 10.0)
    read = [*(mailbox.wait(ticket, 10.0) for ticket in tickets[:-1]), last]
    mailbox.write((7, 0, 0, 0), 10.0)
    return read


@one_fork
def test_notes_arrive_whole_and_in_order_through_a_small_ring() -> Forked:
    count = 3000
    _, read = yield On(2, _exchange_notes, count)
    expected = [(number % 2, number, -number, 5) for number in range(count)]
    assert read == [note for note in expected if note[0] == 1] + [note for note in expected if note[0] == 0]


@one_fork
def test_a_peer_that_is_gone_is_named_however_it_is_noticed() -> Forked:
    """While looking for a peer's gradients between two of its own, a rank must not fall over inside."""

    def run(rank: int) -> None:
        boards = [Board(), Board()]
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        fetch = Fetch(torch.zeros(4), Mailbox(boards[0], child, ctypes.addressof(boards[1]), 1, []), 0, 5.0)

        def program() -> Program:
            yield [Posted(fetch, 1)]
            return ()

        collective = Collective(program(), Label("all_gather", "blocks.0", "shard"), 0, Ledger())
        assert not collective.advance_if_ready()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with pytest.raises(CollectiveError, match=r"all_gather of unit 'blocks\.0'.*rank 1 broke"):
            collective.advance_if_ready()

    yield On(1, run, group=False)
