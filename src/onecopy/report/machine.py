"""Machine: what a run ran on, in words. A run writes it to machine.json; the report shows it."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import torch


def describe_machine(device: torch.device) -> dict[str, str]:
    """What matters to a run's speed and memory, by name. No host name: reports are passed around.

    Args:
        device: where the model is trained.
    """
    words = {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processor": _processor(),
        "cores": f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}",
        "memory": _memory(),
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads a rank",
        "device": device.type,
    }
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        words["device"] = f"{torch.cuda.device_count()} × {found.name}, {found.total_memory / 1e9:,.1f} GB"
        words["cuda"] = str(torch.version.cuda)
    return {name: text for name, text in words.items() if text}


def write_machine(directory: Path, device: torch.device) -> None:
    """Write machine.json into a run directory."""
    text = json.dumps(describe_machine(device), indent=2, ensure_ascii=False)
    (directory / "machine.json").write_text(text + "\n", encoding="utf-8")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _memory() -> str:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return ""
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:,.1f} GB"
