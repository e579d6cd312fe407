"""Runs as a report reads them, written by hand with known numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from onecopy.report.machine import write_machine

PSI = 1_853_760


BLOCKS = 4


def write_run(directory: Path, *, steps: int = 30, ranks: int = 2, memory: bool = True) -> Path:
    """A run directory as `onecopy train` leaves it, with traces: stage 3, fp32, an evaluation every 10 steps."""
    (directory / "trace").mkdir(parents=True)
    (directory / "config.toml").write_text(
        '[model]\npath = ""\nlayers = 4\n[data]\ntrain = ["a.txt", "b<i>.txt"]\n[parallel]\nstage = 3\n'
        f'ranks = {ranks}\ndevice = "cpu"\nprecision = "fp32"\n[run]\ntensorboard = true\n'
    )
    sent = 3 * PSI * 4 * (ranks - 1) // ranks
    records: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        seconds = 0.7 + 0.2 * math.sin(step) + (1.0 if step == 1 else 0.0)
        record: dict[str, Any] = {
            "kind": "train",
            "step": step,
            "loss": 2.6 + 3 * math.exp(-step / 8) + 0.05 * math.sin(3 * step),
            "learning_rate": 1e-3 * min(step / 3, 1),
            "gradient_norm": 1 + 6 / step,
            "seconds": seconds,
            "tokens_per_second": 2048 / seconds,
            "bytes_sent": float(sent * 2 if step % 10 == 1 and step > 1 else sent),
            "peak_memory": 5.3e8 + 1e6 * step,
        }
        if memory:
            record["memory"] = live_memory(0.5 + 0.02 * math.sin(step))
        records.append(record)
        if step % 10 == 0:
            records.append({"kind": "evaluation", "step": step, "loss": record["loss"] - 0.1})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = {"all_gather": 2 / 3, "reduce_scatter": 1 / 3, "all_reduce": 0.0, "total": 1.0}
    summary = {
        "steps": steps,
        "interrupted": False,
        "validation_loss": 2.61,
        "tokens_per_second": 2693.8,
        "peak_memory": [597_016_576, 594_632_704][:ranks],
        "stage": 3,
        "parameters": PSI,
        "padded_parameters": PSI,
        "element_bytes": 4,
        "shard": ranks,
        "replicate": 1,
        "micro_batches": 1,
        "bytes_sent_per_step": {
            op: {"measured": sent * share, "formula": sent * share, "elements": 3 * share * (ranks - 1) / ranks}
            for op, share in rows.items()
        },
    }
    (directory / "summary.json").write_text(json.dumps(summary))
    write_machine(directory, torch.device("cpu"))
    for rank in range(ranks):
        (directory / "trace" / f"rank-{rank}.json").write_text(json.dumps(raw_trace(rank, ranks)))
    return directory


EVENTS = (
    {"kind": "slow", "step": 12, "ranks": [1], "seconds": 0.4, "given_up": 0.0},
    {"kind": "slow", "step": 21, "ranks": [1], "seconds": 0.8, "given_up": 1.0},
    {"kind": "recovery", "step": 21, "ranks": [1], "seconds": 0.9, "lost_seconds": 1.25},
    {"kind": "recovery", "step": 26, "ranks": [0, 1], "seconds": 0.1, "lost_seconds": 0.35},
)


def add_events(directory: Path) -> None:
    """Ranks that were slow or lost, among the metrics of a run."""
    file = directory / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines = sorted([*EVENTS, *lines], key=lambda line: line["step"])
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def live_memory(fullness: float) -> dict[str, int]:
    """Bytes by category when the step is so far from having no activations (0) to having all (1)."""
    state = PSI * 4 // 2
    return {
        "parameters_sliced": state,
        "parameters_gathered": PSI * 4 // 5,
        "gradients_whole": int(PSI * 4 // 5 * fullness),
        "gradients_sliced": int(state * (1 - fullness)),
        "optimizer": 2 * state,
        "activations": int(2.4e7 * fullness),
        "checkpoints": int(1.6e6 * fullness),
        "communication": 2_097_152,
        "mirror": 1_200_000,
        "other": 300_000,
    }


def raw_trace(rank: int, ranks: int) -> dict[str, Any]:
    """A step in which gathers run ahead of compute, overlap each other, and are waited for at times."""
    events: list[dict[str, Any]] = []
    memory = [{"time": 0.0, **live_memory(0)}]

    def add(lane: str, name: str, phase: str, start: float, seconds: float, sent: int = 0) -> None:
        unit = name.partition(" ")[2]
        event = {"name": name, "lane": lane, "phase": phase, "unit": unit, "start": start, "end": start + seconds}
        events.append({**event, "bytes": sent})

    clock, size = 0.004 + 0.001 * rank, PSI * 4 // BLOCKS // 2
    for place in range(BLOCKS):
        add("gather", f"gather h.{place}", "forward", clock - 0.003, 0.012, size)
        add("wait", f"wait h.{place}", "forward", clock, 0.009 - 0.002 * place)
        clock += 0.009 - 0.002 * place
        add("compute", f"forward h.{place}", "forward", clock, 0.022)
        clock += 0.022
        memory.append({"time": clock, **live_memory((place + 1) / BLOCKS)})
    for place in reversed(range(BLOCKS)):
        add("gather", f"gather h.{place}", "backward", clock - 0.01, 0.014, size)
        add("wait", f"wait h.{place}", "backward", clock, 0.004)
        clock += 0.004
        add("compute", f"backward h.{place}", "backward", clock, 0.041)
        clock += 0.041
        add("reduce", f"reduce h.{place}", "backward", clock, 0.05, size)
        memory.append({"time": clock, **live_memory(place / BLOCKS)})
    add("wait", "wait reduce", "step", clock, 0.012)
    add("compute", "optimizer", "step", clock + 0.012, 0.015)
    return {"rank": rank, "step": 7, "stage": 3, "ranks": ranks, "events": events, "memory": memory}
