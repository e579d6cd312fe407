"""Files, pages and the pool of `memory/store`. Oracle: the bytes that were written, held in memory beside them."""

from __future__ import annotations

import errno
import gc
import os
import random
import stat
import threading
from pathlib import Path

import pytest
import torch

from onecopy.errors import OffloadError
from onecopy.memory.store import files
from onecopy.memory.store.files import BLOCK, File, Room, round_up
from onecopy.memory.store.pages import Page, Pages
from onecopy.memory.store.pool import Cancelled, Pool
from ranks import run_ranks

KINDS = ("direct", "through the page cache", "named")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ways in which a file comes about; the last two are what file systems without the first one's calls get."""
    if request.param == "through the page cache":
        monkeypatch.setattr(files, "_DIRECT", 0)
    if request.param == "named":
        monkeypatch.delattr(os, "O_TMPFILE")
    kind: str = request.param
    return kind


def test_random_pieces_at_random_places_read_as_they_were_written(tmp_path: Path, kind: str) -> None:
    def run(_: int) -> bool:
        file = File(tmp_path)
        assert file.is_direct == (kind != "through the page cache")
        draw = random.Random(0)
        size = 3 * 2**20 + 5
        start = file.extend(size)
        held = torch.zeros(size, dtype=torch.uint8)
        for _ in range(60):
            low = draw.randrange(size)
            length = draw.choice((1, 100, BLOCK, 3 * BLOCK + 7, 2**20))
            # Any alignment of memory against the file.
            memory = torch.randint(0, 256, (length + 64,), dtype=torch.uint8)[draw.randrange(64) :][: size - low]
            memory = memory[:length]
            file.write(memory, start + low).wait()
            held[low : low + len(memory)] = memory
            low = draw.randrange(size)
            back = torch.empty(min(draw.choice((1, 5000, 2**21)), size - low), dtype=torch.uint8)
            file.read(back, start + low).wait()
            assert torch.equal(back, held[low : low + len(back)])
        return True

    assert run_ranks(1, run, group=False) == [True]


def test_neighbours_in_one_block_may_be_written_at_the_same_time(tmp_path: Path) -> None:
    def run(_: int) -> bool:
        file = File(tmp_path)
        start = file.extend(40_000)
        parts = torch.arange(40_000, dtype=torch.int32).to(torch.uint8).split(333)
        under_way = [file.write(part.clone(), start + 333 * i) for i, part in enumerate(parts)]
        for transfer in under_way:
            transfer.wait()
        back = torch.empty(40_000, dtype=torch.uint8)
        file.read(back, start).wait()
        return torch.equal(back, torch.cat(parts))

    assert run_ranks(1, run, group=False) == [True]


def test_a_file_has_no_name_and_is_nobody_elses(tmp_path: Path, kind: str) -> None:
    def run(_: int) -> tuple[list[str], int, int, int]:
        place = tmp_path / "states"
        file = File(place)
        file.extend(2**20)
        found = os.fstat(file._handle)
        return os.listdir(place), stat.S_IMODE(found.st_mode), found.st_nlink, found.st_blocks * 512

    ((names, mode, links, held),) = run_ranks(1, run, group=False)
    assert names == []
    assert mode == 0o600
    assert links == 0
    assert held >= 2**20, "a full disk is told when room is reserved"


def test_what_a_killed_run_left_is_cleared_by_the_next_and_nothing_else_is(tmp_path: Path) -> None:
    left = tmp_path / "onecopy-states-abc"
    left.mkdir()
    (left / "states").write_bytes(b"x")
    (tmp_path / "onecopy-states-file").write_bytes(b"mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "onecopy-states-link").symlink_to(tmp_path / "other")

    def run(_: int) -> list[str]:
        File(tmp_path)
        return sorted(os.listdir(tmp_path))

    assert run_ranks(1, run, group=False) == [["onecopy-states-file", "onecopy-states-link", "other"]]


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OffloadError, match=r"cannot make a file in .*file/below"):
        File(tmp_path / "file" / "below")


def test_a_full_disk_is_told_by_name_when_room_is_reserved(tmp_path: Path) -> None:
    def run(_: int) -> str:
        file = File(tmp_path)
        room = os.statvfs(tmp_path)
        with pytest.raises(OffloadError, match="make room there") as caught:
            file.extend((room.f_bavail + room.f_bfree) * room.f_frsize + 2**30)
        assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
        return str(caught.value)

    (message,) = run_ranks(1, run, group=False)
    assert "cannot reserve" in message
    assert str(tmp_path) in message


def test_a_file_cut_short_is_told_by_name(tmp_path: Path) -> None:
    def run(_: int) -> str:
        file = File(tmp_path)
        start = file.extend(2**20)
        os.ftruncate(file._handle, 2**19)
        with pytest.raises(OffloadError, match="cut it short") as caught:
            file.read(torch.empty(2**20, dtype=torch.uint8), start).wait()
        return str(caught.value)

    assert str(tmp_path) in run_ranks(1, run, group=False)[0]


def test_a_read_error_is_told_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def run(_: int) -> str:
        file = File(tmp_path)
        start = file.extend(BLOCK)
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(OffloadError, match=f"cannot read 4,096 bytes .*{tmp_path}.*Input/output error"):
            file.read(torch.empty(BLOCK, dtype=torch.uint8), start).wait()
        return "named"

    assert run_ranks(1, run, group=False) == ["named"]


def test_a_file_system_that_refuses_direct_requests_gets_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.preadv

    def picky(handle: int, *rest: object) -> int:
        import fcntl

        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return read(handle, *rest)  # type: ignore[arg-type]

    def run(_: int) -> tuple[bool, bool]:
        monkeypatch.setattr(os, "preadv", picky)
        file = File(tmp_path)
        start = file.extend(100)
        file.write(torch.full((100,), 7, dtype=torch.uint8), start).wait()
        back = torch.empty(100, dtype=torch.uint8)
        file.read(back, start).wait()
        return file.is_direct, bool((back == 7).all())

    assert run_ranks(1, run, group=False) == [(False, True)]


def test_transfers_are_booked_with_their_bytes(tmp_path: Path) -> None:
    def run(_: int) -> list[tuple[str, int]]:
        booked = []
        file = File(tmp_path, lambda op, nbytes: lambda seconds, exposed: booked.append((op, nbytes, seconds)))
        start = file.extend(5000)
        file.write(torch.zeros(5000, dtype=torch.uint8), start).wait()
        file.read(torch.zeros(77, dtype=torch.uint8), start).wait()
        assert all(seconds > 0 for _, _, seconds in booked)
        return [(op, nbytes) for op, nbytes, _ in booked]

    assert run_ranks(1, run, group=False) == [[("to disk", 5000), ("from disk", 77)]]


def test_a_page_is_read_written_brought_and_put_away(tmp_path: Path) -> None:
    def run(_: int) -> bool:
        page = Page(File(tmp_path), 5000, torch.float32)
        assert not page.read(0, 5000).any()
        values = torch.randn(5000)
        page.store(values)
        assert torch.equal(page.read(123, 4000), values[123:4123])
        page.write(77, torch.ones(3))
        values[77:80] = 1
        memory = Pool().take(page.nbytes)
        page.bring(memory)()
        assert page.at_hand is not None
        assert torch.equal(page.at_hand, values)
        page.at_hand.mul_(2)
        page.is_changed = True
        done = threading.Event()
        page.put_away(memory, done.set)
        page.wait()
        assert done.wait(5)
        with page.opened(write=True) as whole:
            assert torch.equal(whole, 2 * values)
            whole.neg_()
        return torch.equal(page.read(0, 5000), -2 * values)

    assert run_ranks(1, run, group=False) == [True]


def test_states_are_pages_of_their_owner(tmp_path: Path) -> None:
    def run(_: int) -> bool:
        class Owner:
            pass

        pages = Pages(File(tmp_path), 10, torch.float32, torch.bfloat16)
        first, second = Owner(), Owner()
        page = pages.state(first, "momentum", torch.float32)
        assert pages.state(first, "momentum", torch.float32) is page
        assert pages.state(second, "momentum", torch.float32) is not page
        return pages.states_of(first) == [page]

    assert run_ranks(1, run, group=False) == [True]


def test_room_that_was_given_back_is_given_out_again_zeroed(tmp_path: Path, kind: str) -> None:
    """Oracle: the file's size, and zeros."""

    def run(_: int) -> bool:
        file = File(tmp_path)
        keep = Page(file, 100, torch.float32)
        for numel in (3 * 2**20, 2**20, 2**21, 10):
            page = Page(file, numel, torch.float32)
            assert not page.read(0, numel).any()
            page.store(torch.full((numel,), 7.0))
            page.wait()
            # Two stretches beside each other are one.
            other = Page(file, 10, torch.float32) if numel <= 2**21 else None
            del page, other
            gc.collect()
        assert not keep.read(0, 100).any()
        size = file.size
        for value in range(20):
            # What is still being written to a page that is dropped does not meet the next one's.
            page = Page(file, 2**20, torch.float32)
            page.store(torch.full((2**20,), float(value)))
            own = Page(file, 2**20, torch.float32)
            own.store(torch.full((2**20,), -1.0))
            del page
            after = Page(file, 2**20, torch.float32)
            assert not after.read(0, 2**20).any()
            assert bool(own.read(0, 2**20).eq(-1.0).all())
        return size == round_up(400) + round_up(12 * 2**20)

    assert run_ranks(1, run, group=False) == [True]


def test_stretches_are_joined_and_cut() -> None:
    room = Room()
    for start in (4096, 12288, 8192, 40960):
        room.give(start, 4096)
    assert room.take(16384) is None
    assert room.take(8192) == 4096
    assert room.take(8192) is None
    assert [room.take(4096), room.take(4096), room.take(4096)] == [12288, 40960, None]


def test_a_pool_lends_no_more_than_it_may_and_gives_back_what_has_another_size() -> None:
    def run(_: int) -> list[int]:
        changes: list[int] = []
        pool = Pool(changes.append)
        pool.allow(4 * BLOCK)
        first, second = pool.take(2 * BLOCK), pool.take(2 * BLOCK)
        assert first.data_ptr() % BLOCK == 0
        waiting = threading.Thread(target=lambda: changes.append(pool.take(4 * BLOCK).nbytes))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive(), "there is no room"
        pool.give(first)
        pool.give(second)
        waiting.join(5)
        pool.cancel()
        with pytest.raises(Cancelled):
            pool.take(BLOCK)
        return changes

    (changes,) = run_ranks(1, run, group=False)
    assert changes == [2 * BLOCK, 2 * BLOCK, -2 * BLOCK, -2 * BLOCK, 4 * BLOCK, 4 * BLOCK]
