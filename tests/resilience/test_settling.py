"""Who gets what from whom after a loss; and checksums. Oracles: counted by hand."""

from __future__ import annotations

import pytest
import torch

from onecopy.errors import RecoveryError
from onecopy.resilience import ring
from onecopy.resilience.settling import MIRROR, OWN, Standing, Transfer, plan_transfers
from onecopy.resilience.slices import checksum


def _ring(*versions: int) -> list[Standing]:
    return [Standing(version, version >= 0, place) for place, version in enumerate(versions)]


def test_a_lost_rank_gets_its_slices_from_its_mirror_and_mirrors_the_next() -> None:
    assert plan_transfers(_ring(5, 5, -1, 5), shards=4, mirrored=True) == [
        Transfer(1, 2, MIRROR, OWN),
        Transfer(3, 2, OWN, MIRROR),
    ]


def test_two_ranks_that_hold_nothing_of_each_other_come_back_at_once() -> None:
    assert plan_transfers(_ring(-1, 5, -1, 5), shards=4, mirrored=True) == [
        Transfer(3, 0, MIRROR, OWN),
        Transfer(1, 0, OWN, MIRROR),
        Transfer(1, 2, MIRROR, OWN),
        Transfer(3, 2, OWN, MIRROR),
    ]


def test_a_lost_host_comes_back_where_the_ring_goes_from_host_to_host() -> None:
    """Two hosts of two ranks: the second one, ranks 2 and 3, is lost."""
    assert plan_transfers(_ring(5, 5, -1, -1), shards=4, mirrored=True, stride=2) == [
        Transfer(0, 2, MIRROR, OWN),
        Transfer(0, 2, OWN, MIRROR),
        Transfer(1, 3, MIRROR, OWN),
        Transfer(1, 3, OWN, MIRROR),
    ]
    with pytest.raises(RecoveryError, match="slice 3 of 4 is lost"):
        plan_transfers(_ring(5, 5, -1, -1), shards=4, mirrored=True)


@pytest.mark.parametrize("ranks, on_a_host, expected", [(4, 2, 2), (12, 4, 4), (4, 4, 1), (3, 2, 1), (1, 1, 1)])
def test_a_rank_and_its_holder_are_on_different_hosts(
    monkeypatch: pytest.MonkeyPatch, ranks: int, on_a_host: int, expected: int
) -> None:
    """Where all hosts have as many ranks; and every rank has one holder, itself only where it is alone."""
    monkeypatch.setattr(ring, "membership", object)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_a_host))
    assert ring.stride(ranks) == expected
    holders = [ring.holder(rank, ranks) for rank in range(ranks)]
    assert sorted(holders) == list(range(ranks))
    assert [ring.held(holder, ranks) for holder in holders] == list(range(ranks))
    if ranks > on_a_host and ranks % on_a_host == 0:
        assert all(rank // on_a_host != holder // on_a_host for rank, holder in enumerate(holders))


def test_of_two_ranks_each_is_the_others_mirror() -> None:
    assert plan_transfers(_ring(-1, 5), shards=2, mirrored=True) == [
        Transfer(1, 0, MIRROR, OWN),
        Transfer(1, 0, OWN, MIRROR),
    ]


def test_with_copies_any_holder_of_the_same_slice_will_do() -> None:
    standings = [Standing(version, True, rank % 2) for rank, version in enumerate((-1, 5, 5, -1))]
    assert plan_transfers(standings, shards=2, mirrored=False) == [Transfer(2, 0, OWN, OWN), Transfer(1, 3, OWN, OWN)]


@pytest.mark.parametrize("versions, mirrored", [((5, -1, -1, 5), True), ((5, -1, 5, 5), False)])
def test_a_slice_that_nobody_holds_is_named(versions: tuple[int, ...], mirrored: bool) -> None:
    with pytest.raises(RecoveryError, match=r"every rank that held slice . of 4 is lost"):
        plan_transfers(_ring(*versions), shards=4, mirrored=mirrored)


@pytest.mark.parametrize("numel", [1, 7, 1024, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_checksum_sees_a_changed_bit_and_exchanged_words(numel: int, dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 100, (numel,), generator=torch.Generator().manual_seed(numel)).to(dtype)
    whole = checksum(tensor)
    assert whole == checksum(tensor.clone())
    for place in {0, numel // 2, numel - 1}:
        changed = tensor.clone()
        changed.view(torch.uint8)[place * tensor.itemsize] ^= 1
        assert checksum(changed) != whole
    if numel > 16:
        exchanged = tensor.clone()
        exchanged[:16] = tensor[:16].flip(0)
        assert checksum(exchanged) != whole
