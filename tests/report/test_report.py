"""`onecopy report` without a browser: what is read, what the page says, and a trace whose sums are the input's."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from onecopy.errors import SettingsError
from onecopy.report.figures import thin_curve, thin_stacks
from onecopy.report.page import render
from onecopy.report.perfetto import perfetto_trace
from onecopy.report.rows import assign_rows
from onecopy.report.run import CATEGORIES, LANES, Event, Trace, read_run
from report_runs import PSI, add_events, raw_trace, write_run

COMMAND = [sys.executable, "-m", "onecopy.cli.main", "report"]


def onecopy_report(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"COLUMNS": "120"},
        check=False,
    )


def page_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def notes(page: str) -> set[str]:
    """What the page says is missing."""
    return set(re.findall(r'data-note="([a-z-]+)"', page))


# --- the page


def test_page_holds_the_whole_run(tmp_path: Path) -> None:
    page = render(read_run(write_run(tmp_path / "run-a")))
    for words in (
        "<title>run-a – onecopy report</title>",
        "1,853,760 parameters, stage 3 over 2 ranks (cpu, fp32), 30 steps",
        "2,694",
        "formula: exact",
        "<td>11,122,560</td><td>11,122,560</td><td>exact</td><td>1.5</td>",
        "N = 2, g = 1",
        "Inside step 7",
        "a.txt, b&lt;i&gt;.txt",
        f"<dt>torch</dt><dd>{torch.__version__}",
        *(f'id="{chart}"' for chart in ("memory-steps", "traffic-steps", "timeline", "memory-step", "loss", "speed")),
    ):
        assert words in page, words
    assert notes(page) == set()
    data = page_data(page)
    assert [category["key"] for category in data["categories"]] == list(CATEGORIES)
    assert len(data["memory"]["steps"]) == len(data["training"]["loss"]) == 30
    # Steps 11 and 21 also hold the gathers of an evaluation.
    assert [step for step, _ in data["traffic"]["after_evaluation"]] == [11, 21]
    assert data["traffic"]["formula"] == 11_122_560
    assert {size for _, size in data["traffic"]["sent"]} == {11_122_560}


def test_page_loads_nothing(tmp_path: Path) -> None:
    page = render(read_run(write_run(tmp_path / "run")))
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|@import|url\((?!#)|\bsrc=|<link(?! rel=\"icon\" href=\"data:,\")", page)


def test_text_in_the_data_cannot_break_out(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    trace = raw_trace(0, 2)
    trace["events"][0]["name"] = "</script><script>alert(1)</script>"
    (directory / "trace/rank-0.json").write_text(json.dumps(trace))
    page = render(read_run(directory))
    assert "<script>alert" not in page
    assert trace["events"][0]["name"] in page_data(page)["traces"][0]["names"]


def test_steps_are_drawn_alike_where_activations_were_counted_in_one_alone(tmp_path: Path) -> None:
    """Oracle: what the run's own records hold."""
    directory = write_run(tmp_path / "run", steps=4)
    assert "ctivations, which" not in render(read_run(directory))
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    highest = f"{records[2]['memory']['activations'] / 1e6:,.1f} MB"
    remarks = {
        3: f"Without activations, which were counted in step 3 alone: {highest}",
        0: "Activations were not counted.",
    }
    for counted, words in remarks.items():
        for record in records:
            record["memory"]["activations"] *= record["step"] == counted
        (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
        page = render(read_run(directory))
        assert words in page
        data = page_data(page)
        place = [kind["key"] for kind in data["categories"]].index("activations")
        assert [stack[place] for _, stack in data["memory"]["steps"]] == [0.0] * 4
        others = {kind["key"]: number for number, kind in enumerate(data["categories"]) if kind["key"] != "activations"}
        for (_, stack), record in zip(data["memory"]["steps"], records, strict=True):
            assert {kind: stack[number] for kind, number in others.items()} == {
                kind: record["memory"].get(kind, 0) for kind in others
            }


def test_lanes_and_waits_in_the_table(tmp_path: Path) -> None:
    page = render(read_run(write_run(tmp_path / "run")))
    table = page[page.index("<caption>Time in which each lane was busy") :]
    # 4 blocks forward and backward, and the optimizer; 8 gathers; 4 reduces, of whose 50 ms 5 overlap; 24 + 16 + 12 ms.
    row = re.search(r'<th scope="row">0</th>(.*?)</tr>', table)
    assert row
    wanted = ["267.0 ms", "104.0 ms", "185.0 ms", "52.0 ms"]
    assert re.findall(r"<td>(.*?)</td>", row[1])[:4] == wanted


def test_busy_time_counts_no_moment_twice() -> None:
    spans = [("compute", 0, 10), ("wait", 1, 3), ("compute", 3, 6), ("gather", -2, 2), ("compute", 12, 14)]
    trace = Trace(
        0, 1, sorted((Event("", lane, "forward", "", a, b, 0) for lane, a, b in spans), key=lambda e: e.start), []
    )
    assert (trace.busy("compute"), trace.busy("wait"), trace.busy("gather")) == (12, 2, 4)
    assert trace.busy("compute", "wait") == 12


def test_plan_beside_what_was_measured(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    assert "Planned and measured" not in render(read_run(directory))
    summary = json.loads((directory / "summary.json").read_text())
    summary["planned"] = {"memory": {"optimizer": PSI * 4}, "bytes_sent": 11_122_560, "seconds": 0.5}
    summary["planned"] |= {"off_device": {"checkpoints": 8_000_000}, "activations_sent": 5_000_000}
    summary["activations_sent_per_step"] = 5_000_000
    steps = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    moved = [step | {"off_device": {"checkpoints": 8_000_000}} for step in steps]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in moved))
    (directory / "summary.json").write_text(json.dumps(summary))
    page = render(read_run(directory))
    assert '<th scope="row">optimizer states</th><td>7.4 MB</td><td>7.4 MB</td><td>exact</td>' in page
    assert '<th scope="row">sent per step</th><td>11.1 MB</td><td>11.1 MB</td><td>exact</td>' in page
    assert '<th scope="row">activation checkpoints, off the device</th><td>8.0 MB</td><td>8.0 MB</td>' in page
    assert '<th scope="row">activations sent per step</th><td>5.0 MB</td><td>5.0 MB</td>' in page
    assert '<th scope="row">time of a step</th><td>500.0 ms</td>' in page


# --- less than a whole run


def test_run_without_traces_and_categories(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", memory=False)
    for path in (directory / "trace").iterdir():
        path.unlink()
    page = render(read_run(directory))
    assert notes(page) == {"trace", "memory"}
    assert 'id="timeline"' not in page
    assert 'id="memory-steps"' in page  # the process's peak is still known
    ended = onecopy_report(directory)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not (directory / "trace.json").exists()
    ended = onecopy_report(directory, "--trace", tmp_path / "t.json")
    assert ended.returncode == 2
    assert "error: no trace to write" in ended.stderr


def test_killed_run(tmp_path: Path) -> None:
    """No summary, half a last line, half a trace, a loss that is not a number."""
    directory = write_run(tmp_path / "run", steps=5)
    (directory / "summary.json").unlink()
    (directory / "machine.json").unlink()
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 6, "loss": NaN}\n{"kind": "tr')
    text = (directory / "trace/rank-1.json").read_text()
    (directory / "trace/rank-1.json").write_text(text[: len(text) // 2])
    page = render(read_run(directory))
    assert notes(page) == {"summary", "machine", "metrics", "trace", "traffic"}
    assert "the run was killed, or is still going on" in page
    assert "trace/rank-1.json cannot be read" in page
    data = page_data(page)
    assert data["training"]["loss"][-1] == [6, None]
    assert [trace["rank"] for trace in data["traces"]] == [0]


def test_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[parallel]\nstage = 2\n")
    assert notes(render(read_run(tmp_path))) == {"summary", "machine", "metrics", "trace", "traffic", "memory"}


def test_unknown_category_is_not_lost(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=1, ranks=1)
    trace = raw_trace(0, 1)
    trace["memory"][0]["second_copy"] = 5
    (directory / "trace/rank-0.json").write_text(json.dumps(trace))
    data = page_data(render(read_run(directory)))
    assert data["categories"][-1] == {"key": "second_copy", "label": "second copy"}
    assert data["traces"][0]["memory"][0][1][-1] == 5


@pytest.mark.parametrize("change", [{"lane": "nowhere"}, {"end": -1.0}, {"start": "x"}, {"start": math.nan}])
def test_malformed_event_is_told(tmp_path: Path, change: dict[str, Any]) -> None:
    directory = write_run(tmp_path / "run", steps=1)
    trace = raw_trace(0, 2)
    trace["events"][3] |= change
    (directory / "trace/rank-0.json").write_text(json.dumps(trace))
    run = read_run(directory)
    assert "trace/rank-0.json cannot be read" in run.notes["trace"]
    assert [trace.rank for trace in run.traces] == [1]


def test_lines_and_files_of_another_kind_are_told(tmp_path: Path) -> None:
    """JSON that is whole and yet no record: of every JSON type, and a step that no integer can be."""
    directory = write_run(tmp_path / "run", steps=2)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('5\nnull\n[]\n"x"\n{"kind": []}\n{"kind": "train", "step": 1e999}\n')
    for rank, text in enumerate(("[]", '{"rank": 1, "step": 1, "events": [5]}')):
        (directory / f"trace/rank-{rank}.json").write_text(text)
    run = read_run(directory)
    assert run.notes["metrics"].startswith("6 line(s)")
    assert len(run.steps) == 2
    assert run.notes["trace"].count("cannot be read") == 2
    render(run)


def test_lost_and_slow_ranks_are_told_with_the_seconds_that_they_cost(tmp_path: Path) -> None:
    """Oracle: `report_runs.EVENTS`."""
    directory = write_run(tmp_path / "run")
    assert "Lost and slow ranks" not in render(read_run(directory))
    add_events(directory)
    trace = directory / "trace/rank-0.json"
    trace.write_text(trace.read_text().replace('"step": 7', '"step": 26'))
    with (directory / "metrics.jsonl").open("a") as file:
        # Lines of another version, and two of a stranger.
        file.write('{"kind": "recovery", "step": 29, "seconds": 0.25, "ranks": 2.0}\n')
        file.write('{"kind": "slow", "step": 3}\n{"kind": "recovery", "step": 3, "seconds": 1, "ranks": ["<b>"]}\n')
    run = read_run(directory)
    assert run.notes["metrics"].startswith("2 line(s)")
    page = render(run)
    assert "30 steps, ranks lost 3 times, which cost 1.85 s" in page
    for words, step in (
        ("rank 1 slow for 0.40 s", 12),
        ("rank 1 slow for 0.80 s, given up", 21),
        ("rank 1 lost and replaced, 1.25 s lost", 21),
        ("ranks 0, 1 lost and replaced, 0.35 s lost", 26),
        ("a rank lost and replaced, 0.25 s lost", 29),
    ):
        assert f'<th scope="row">{step}</th><td>{words}</td>' in page, words
    assert "ranks 0, 1 lost and replaced, 0.35 s lost before step 26 was made." in page
    assert [event[:3] for event in page_data(page)["events"]] == [
        [12, "slow", 0.4],
        [21, "slow", 0.8],
        [21, "recovery", 1.25],
        [26, "recovery", 0.35],
        [29, "recovery", 0.25],
    ]


def test_no_run_directory(tmp_path: Path) -> None:
    for place in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(SettingsError, match=r"config\.toml, metrics\.jsonl, summary\.json"):
            read_run(place)
    ended = onecopy_report(tmp_path / "nowhere")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: there is no run directory")


# --- thinning and rows


def test_long_series_keep_their_extremes() -> None:
    points: list[tuple[float, float | None]] = [(step, math.sin(step)) for step in range(50_000)]
    points[31_234], points[7_001], points[44_444] = (31_234, 99.0), (7_001, -99.0), (44_444, None)
    thin = thin_curve(points)
    assert len(thin) <= 2000
    assert {points[31_234], points[7_001], points[44_444]} <= set(thin)
    assert thin == sorted(thin, key=lambda point: point[0])
    stacks: list[tuple[float, list[float]]] = [(step, [1.0, float(step == 777)]) for step in range(50_000)]
    assert (777, [1.0, 1.0]) in thin_stacks(stacks)


def test_overlapping_events_get_rows_of_their_own() -> None:
    spans = [(0, 4), (1, 2), (2, 3), (2.5, 6), (4, 5)]
    events = [Event("", "gather", "forward", "", start, end, 0) for start, end in spans]
    assert assign_rows(events) == [0, 1, 1, 2, 0]


# --- the trace for Perfetto


def test_perfetto_trace_is_valid_and_complete(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    document = json.loads(json.dumps(perfetto_trace(read_run(directory).traces), allow_nan=False))
    entries = document["traceEvents"]
    assert {entry["ph"] for entry in entries} == {"M", "X", "C"}
    spans = [entry for entry in entries if entry["ph"] == "X"]
    threads = {(entry["pid"], entry["tid"]) for entry in entries if entry["args"].get("name") and entry["ph"] == "M"}
    assert {(span["pid"], span["tid"]) for span in spans} <= threads
    for key in sorted(threads):
        own = sorted((s["ts"], s["ts"] + s["dur"]) for s in spans if (s["pid"], s["tid"]) == key)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(own))
    for rank in (0, 1):
        raw = raw_trace(rank, 2)
        seconds, sent = Counter[str](), Counter[str]()
        for span in spans:
            if span["pid"] == rank:
                seconds[span["args"]["lane"]] += span["dur"] / 1e6
                sent[span["args"]["lane"]] += span["args"]["bytes"]
        for lane in LANES:
            events = [event for event in raw["events"] if event["lane"] == lane]
            assert seconds[lane] == pytest.approx(sum(event["end"] - event["start"] for event in events))
            assert sent[lane] == sum(event["bytes"] for event in events)
        counters = [entry["args"] for entry in entries if entry["ph"] == "C" and entry["pid"] == rank]
        assert counters == [{key: size for key, size in at.items() if key != "time"} for at in raw["memory"]]


# --- the command


def test_command_writes_page_and_trace(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    ended = onecopy_report(directory)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (directory / "report.html").read_text() == render(read_run(directory))
    assert str(directory / "report.html") in ended.stdout
    default = json.loads((directory / "trace.json").read_text())
    ended = onecopy_report(directory, "--out", tmp_path / "page.html", "--trace", tmp_path / "spans.json")
    assert ended.returncode == 0
    assert (tmp_path / "page.html").is_file()
    assert json.loads((tmp_path / "spans.json").read_text()) == default
    ended = onecopy_report(directory, "--out", tmp_path / "no" / "page.html")
    assert ended.returncode == 2
    assert "cannot write" in ended.stderr


def test_help_stays_light() -> None:
    code = (
        "import sys; sys.argv = ['onecopy', 'report', '--help']\n"
        "from onecopy.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "sys.exit(str({'torch', 'jinja2', 'onecopy.report'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stderr.strip() == "set()"
    assert "RUN_DIR" in ended.stdout
