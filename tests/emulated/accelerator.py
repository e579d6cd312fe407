"""The emulated device as `torch.emu`, with "emunccl" as its backend for collectives: how it is built and started.

`device/` holds it, in C++. `build` compiles it once, into a cache named by the hash of its source and of the versions
of torch and Python; `start` registers it with torch in this process. Only forked ranks do that: a process has the
device until it ends, and torch would take it for the accelerator of every other test too.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

CACHE: Final = "ONECOPY_EMULATED_CACHE"
"""Environment variable: a folder for what is built. Unset: onecopy/emulated in the user's cache."""

NAME: Final = "emu"
BACKEND: Final = "emunccl"

_SOURCE: Final = Path(__file__).parent / "device"
_MODULE: Final = "emulated_device"
_NOT_ORIGINS: Final = (
    "/torch/",
    "/emulated/accelerator.py",
    "/emulated/on_device.py",
    "/support/ranks.py",
    "<frozen",
    "/contextlib.py",
    "<string>",
)
_ANY_COLLECTIVE: Final = ("/comm/native_calls.py", "/comm/collective.py", "/comm/mesh.py")
"""Through these go the waits for all collectives: what tells them apart is who called."""


class CannotBuild(Exception):
    """This machine cannot compile the device; the message says what it needs."""


def build() -> Path:
    """The compiled device, from the cache if it is there.

    Raises:
        CannotBuild: without a C++20 compiler or Python's headers.
    """
    sources = sorted(_SOURCE.iterdir())
    texts = [source.read_text() for source in (*sources, Path(__file__))]
    text = "".join([*texts, torch.__version__, sys.version])
    folder = Path(os.environ.get(CACHE) or _user_cache() / "onecopy" / "emulated")
    built = folder / f"{_MODULE}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if built.exists():
        return built
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    headers = Path(sysconfig.get_paths()["include"])
    if compiler is None or not (headers / "Python.h").exists():
        raise CannotBuild("the emulated device is built with g++ 11 or later and Python's headers (python3-dev)")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / built.name
        # Without NDEBUG some of torch's classes would have members that they do not have in torch.
        command = [compiler, "-O1", "-DNDEBUG", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-w"]
        command += [f"-DTORCH_EXTENSION_NAME={_MODULE}", str(_SOURCE / "module.cpp"), "-o", str(made)]
        for include in [*cpp_extension.include_paths(), str(headers)]:
            command += ["-isystem", include]
        for library in cpp_extension.library_paths():
            command += [f"-L{library}", f"-Wl,-rpath,{library}"]
        command += ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the emulated device does not compile:\n{done.stderr[-8000:]}")
        made.replace(built)  # at once: others may look for it meanwhile
    return built


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def start(built: Path, devices: int, *, alone: bool = False) -> Any:
    """Register ``devices`` devices with torch, in this process and for the rest of its life.

    Args:
        alone: there are no other ranks, whatever the size of a group (`rehearse.py`).

    Returns:
        The module of `device/module.cpp`.
    """
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, str(built))
    spec = importlib.util.spec_from_loader(_MODULE, loader)
    assert spec is not None
    device = importlib.util.module_from_spec(spec)
    loader.exec_module(device)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Module(device, devices))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    # As on CUDA, `.to(device)` is to leave tied parameters tied.
    torch.__future__.set_swap_module_params_on_conversion(True)
    device.set_up(devices, _where, _origin)
    atexit.register(device.close)

    groups: dict[tuple[int, ...], tuple[Any, Iterator[int]]] = {}

    def make_group(options: Any, _: Any) -> Any:
        # Groups of the same ranks share one on gloo: their collectives must come in one order too.
        rank, size = options.group_rank, options.group_size
        ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
        if ranks not in groups:
            gloo = None if alone else dist.ProcessGroupGloo(options.store, rank, size, options.timeout)
            groups[ranks] = gloo, count()
        gloo, numbers = groups[ranks]
        return device.make_group(gloo, rank, size, next(numbers), options.timeout.total_seconds())

    kinds = [NAME, "cpu"] if alone else [NAME]
    dist.Backend.register_backend(BACKEND, make_group, extended_api=True, devices=kinds)
    return device


class _Module:
    """What torch expects at ``torch.<device>``."""

    Stream, Event = torch.Stream, torch.Event

    def __init__(self, device: Any, devices: int) -> None:
        self._device = device
        self._devices = devices

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _lazy_init(self) -> None: ...

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return self._devices

    def current_device(self) -> int:
        return self._device.current_device()

    def set_device(self, device: Any) -> None:
        self._device.set_device(device if isinstance(device, int) else torch.device(device).index)

    def device(self, device: Any) -> Any:
        return torch.accelerator.device_index(device if isinstance(device, int) else torch.device(device).index)

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def stream(self, stream: torch.Stream) -> Any:
        return stream

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize(device)

    def manual_seed(self, seed: int) -> None: ...  # its kernels draw the CPU's random numbers

    def manual_seed_all(self, seed: int) -> None: ...

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def memory_allocated(self, device: Any = None) -> int:
        return self._device.memory()[0]

    def max_memory_allocated(self, device: Any = None) -> int:
        return self._device.memory()[1]


def _lines() -> Iterator[tuple[str, str]]:
    """Files, and lines of them, that are running outside of torch; innermost first."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in _NOT_ORIGINS):
            yield name, f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back


def _where() -> str:
    found = [line for _, (_, line) in zip(range(3), _lines(), strict=False)]
    return " < ".join(found) or "a thread of autograd"


def _origin() -> str:
    for name, line in _lines():
        if not name.endswith(_ANY_COLLECTIVE):
            _, ours, inside = name.rpartition("/onecopy/")
            return f"onecopy/{inside}:{line.rpartition(':')[2]}" if ours else line
    return "a thread of autograd"
