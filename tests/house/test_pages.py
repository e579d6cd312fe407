"""Whole programs of README.md and docs/: each runs on two ranks as under torchrun; both sides of a difference agree.

Examples that are no whole programs are `test_docs.py`'s.
"""

from __future__ import annotations

import importlib.util
import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import onecopy
from places import ROOT
from ranks import run_ranks

_KEPT: list[dict[str, Any]] = []
"""What programs left, in a rank that has run one."""

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)


def side(difference: str, sign: str) -> str:
    """The program before (-) or after (+) a difference."""
    return "".join(line[1:] or "\n" for line in difference.splitlines(keepends=True) if line[0] in (" ", sign, "\n"))


def run(program: str, ranks: int = 2) -> list[list[str]]:
    """The lines that each rank of a program prints."""
    meet_as_told = dist.init_process_group

    def meet(rank: int, size: int, store: Path, limit: float) -> None:
        found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
        os.environ.update({name: str(value) for name, value in found.items()}, GLOO_SOCKET_IFNAME="lo")

        def init_process_group(backend: str) -> None:
            """As under torchrun; but over a file, since a forked rank's server of a TCP store may not end."""
            meet_as_told(
                backend,
                store=dist.FileStore(str(store), size),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=limit),
            )

        dist.init_process_group = init_process_group

    def execute(_: int) -> list[str]:
        lines: list[str] = []
        names: dict[str, Any] = {"__name__": "__main__", "print": lambda *said: lines.append(" ".join(map(str, said)))}
        # DDP's reducer and gloo's threads are not taken down: when one waits for the other, a rank never ends.
        _KEPT.append(names)
        exec(compile(program, "program", "exec"), names)
        return lines

    return run_ranks(ranks, execute, join=meet, timeout=120)


def test_the_readmes_program_learns_to_count_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a model that knows nothing has a loss of ln 97 = 4.57."""
    monkeypatch.chdir(tmp_path)
    (program,) = blocks("README.md", "python")
    (loss,), _ = run(program)
    assert float(loss.removeprefix("loss ")) < 4.0
    assert (tmp_path / "checkpoints" / "latest").is_file()


def test_two_ranks_of_the_first_page_have_the_loss_of_its_plain_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain, sharded, resumed = blocks("docs/start.md", "python")
    (expected,) = run(plain, ranks=1)[0]
    found, *table = run(sharded)[0]
    assert float(found.removeprefix("loss ")) == pytest.approx(float(expected.removeprefix("loss ")), abs=2e-4)
    assert "optimizer" in table[0]
    assert [run(resumed)[0], run(resumed, ranks=3)[0]] == [["step 10"], ["step 20"]]


@pytest.mark.parametrize("number, original", [(0, "DDP"), (1, "fully_shard"), (2, "deepspeed")])
def test_both_sides_of_a_move_have_the_same_losses(
    number: int, original: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the peer itself; without DeepSpeed's package, plain DDP with the same settings."""
    monkeypatch.chdir(tmp_path)
    moves = blocks("docs/migrate.md", "diff")
    before, after = side(moves[number], "-"), side(moves[number], "+")
    if original == "deepspeed":
        # DDP's page has the same model, data, optimizer and clipping.
        assert importlib.util.find_spec("onecopy.compat.deepspeed") is not None
        before = side(moves[0], "-")
    for theirs, ours in zip(run(before), run(after), strict=True):
        assert [float(loss) for loss in ours] == pytest.approx([float(loss) for loss in theirs], rel=1e-4)
        assert len(ours) == 5


def test_every_error_has_a_paragraph_and_says_where() -> None:
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs" / "trouble.md").read_text(), flags=re.MULTILINE)
    kinds = {name: kind for name, kind in vars(onecopy.errors).items() if isinstance(kind, type)}
    assert set(headings) == set(kinds)
    for name, kind in kinds.items():
        assert kind("words").__notes__ == [f"More: docs/trouble.md#{name.lower()}"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_page_and_a_heading(page: Path) -> None:
    """Oracle: the files, and the headings as repository pages name them."""
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, heading = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", found.read_text(), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, target
