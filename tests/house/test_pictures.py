"""The pictures of the docs are drawn from the results, and can be read on a phone. Oracles: the results; XML's parser.

A letter of DejaVu Sans, the widest font that the drawings name, is taken as 0.62 of its size, its mean in English text.
"""

from __future__ import annotations

import json
import re
import statistics
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

import pictures
from pages import links, sources
from places import ROOT
from publish.drawing import WIDTH, Bar, bars

RESULTS = ROOT / "benchmarks/results"
SVG = "{http://www.w3.org/2000/svg}"
SIZES = {"title": 14.0}


def _drawing(name: str) -> ElementTree.Element:
    return ElementTree.fromstring((pictures.IMAGES / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_as_the_results_have_it(name: str) -> None:
    drawn = (pictures.IMAGES / name).read_text(encoding="utf-8")
    assert drawn == pictures.PICTURES[name](), "run python benchmarks/pictures.py"


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_words_lie_inside_and_apart(name: str) -> None:
    lines: dict[float, list[tuple[float, float]]] = {}
    for text in _drawing(name).iter(f"{SVG}text"):
        width = 0.62 * SIZES.get(text.get("class", ""), 12.0) * len(text.text or "")
        x = float(text.get("x", "nan"))
        start = x - {"start": 0.0, "middle": width / 2, "end": width}[text.get("text-anchor", "start")]
        assert start >= 0, text.text
        assert start + width <= WIDTH, text.text
        lines.setdefault(float(text.get("y", "nan")), []).append((start, start + width))
    for words in lines.values():
        for (_, end), (start, _) in pairwise(sorted(words)):
            assert end <= start


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_light_or_dark_and_loads_nothing(name: str) -> None:
    text = (pictures.IMAGES / name).read_text(encoding="utf-8")
    assert "@media (prefers-color-scheme:dark)" in text
    light, dark = (dict(re.findall(r"--([\w-]+):(#\w+)", part)) for part in text.split("@media")[:2])
    used = set(re.findall(r"var\(--([\w-]+)\)", text))
    assert used <= set(light) & set(dark)
    assert light["ground"] != dark["ground"]
    assert set(re.findall(r"https?://[^\"]+", text)) == {"http://www.w3.org/2000/svg"}


def test_bars_are_as_long_as_their_values() -> None:
    drawn = ElementTree.fromstring(bars("Title", [Bar("a", {"accent": 4.0}, "4"), Bar("b", {"accent": 1.0}, "1")]))
    _, long, short = (float(box.get("width", "nan")) for box in drawn.iter(f"{SVG}rect"))
    assert long == pytest.approx(4 * short, abs=0.2)


def test_counts_of_the_reliability_chart_are_the_pages() -> None:
    page = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    for row in json.loads((ROOT / "benchmarks/results/reliability.json").read_text()):
        assert f"{row['count']:,} {row['noun']}" in page
        assert row["command"] in page
        assert row["lost"] == 0


def _median_ratio(contest: str, system: str) -> float:
    timed = json.loads((RESULTS / f"{contest}.json").read_text())["contests"][0]["timed"]
    pairs = zip(timed[system]["seconds"], timed["DDP"]["seconds"], strict=True)
    return statistics.median(own / other for own, other in pairs)


def test_figures_of_the_evidence_are_those_of_the_results() -> None:
    page = " ".join((ROOT / "docs/evidence.md").read_text(encoding="utf-8").split())
    first, second, third = (f"{_median_ratio('compare_gpt30m_2', f'onecopy stage {n}'):.2f}" for n in (1, 2, 3))
    assert f"takes {first}, {second} and {third} times that of DDP" in page
    peer = _median_ratio("compare_gpt30m_2", "fully_shard, reshard_after_forward=True")
    assert f"takes {peer:.2f} times that of DDP" in page
    assert f"stage 3 takes {_median_ratio('compare_gpt30m_2', 'DeepSpeed stage 3'):.2f} times" in page
    second, third = (f"{_median_ratio('compare_gpt30m_2_g4', f'onecopy stage {n}'):.2f}" for n in (2, 3))
    assert f"take {second} and {third} times as long" in page

    rows = json.loads((RESULTS / "memory.json").read_text())
    peaks = {row["stage"]: sum(row["peak"].values()) / 1e6 for row in rows if row["ranks"] == 4 and not row["tied"]}
    assert f"falls from {peaks[0]:.0f} MB to {peaks[1]:.0f} MB at stages 1 and 2, and to {peaks[3]:.0f} MB" in page
    assert f"{peaks[1]:.0f}" == f"{peaks[2]:.0f}"
    counted = {tied: min(r["metered"] / r["allocated"] for r in rows if r["tied"] == tied) for tied in (False, True)}
    assert f"at least {int(100 * counted[False])} % of the tensors" in page
    assert f"{100 * counted[True]:.0f} % are counted then" in page

    sent = json.loads((RESULTS / "wire.json").read_text())["measured"]
    most = max(max(row["sent"]) / row["paper"] for row in sent if row["system"].startswith("onecopy"))
    assert f"at most {100 * (most - 1):.1f} % more" in page


def test_every_picture_is_shown_somewhere() -> None:
    shown = {target.rpartition("/")[2] for page in sources() for _, target in links(page)}
    assert set(pictures.PICTURES) <= shown
