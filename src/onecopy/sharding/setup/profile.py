"""profile: a close look at a few steps: the timeline, the memory over time, and the activations that autograd saves.

It costs a callback for each saved tensor and each change of memory, so it is for one step of many.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from onecopy.comm.dtensors import address_of, local_of
from onecopy.observe.meter import Meter
from onecopy.observe.timeline import Timeline
from onecopy.sharding.engine.engine import Engine
from onecopy.sharding.setup.api import engine_of


class Profile:
    """What `profile` has recorded.

    Attributes:
        timeline: events of computation and collectives.
        memory: the meter's categories in bytes with their ``time`` in seconds, after every change.
    """

    def __init__(self, engine: Engine) -> None:
        self.timeline = Timeline()
        self.memory: list[dict[str, float]] = []
        self._engine = engine
        self._meter = engine.meter
        self._sample()

    def _sample(self) -> None:
        self.memory.append({"time": perf_counter() - self.timeline.began, **self._meter.live})

    def save(self, path: str | Path, **facts: object) -> None:
        """Write events, memory and ``facts`` (such as ``step=7``) as JSON, for `onecopy report`."""
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        mesh = self._engine.mesh
        content = {
            "rank": rank,
            "stage": self._engine.stage.number,
            "ranks": mesh.size,
            **facts,
            "events": [asdict(event) for event in self.timeline.events],
            "memory": self.memory,
        }
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))


@contextmanager
def profile(model: nn.Module) -> Iterator[Profile]:
    """Record what a sharded model does inside the `with` block, which should hold whole steps, forward to optimizer.

    Yields:
        A `Profile`, which grows until the block ends.

    Raises:
        UsageError: if ``model`` is not what `shard` returned.
    """
    engine = engine_of(model)
    seen = Profile(engine)
    engine.ledger.timeline = seen.timeline
    engine.meter.listener = seen._sample
    saved = _SavedTensors(engine)
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            yield seen
    finally:
        engine.ledger.timeline = None
        engine.meter.listener = None


class _SavedTensors:
    """Counts the storages that autograd keeps alive, each once, parameters aside."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._meter = engine.meter
        self._holders: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Any:
        address = address_of(tensor)
        if not address or any(unit.shows(tensor) for unit in self._engine.units):
            return tensor
        return _Held(tensor, address, local_of(tensor).untyped_storage().nbytes(), self._holders, self._meter)

    def unpack(self, packed: Any) -> Tensor:
        tensor: Tensor = packed.tensor if isinstance(packed, _Held) else packed
        return tensor


class _Held:
    """A saved tensor; lives as long as autograd keeps it."""

    def __init__(self, tensor: Tensor, address: int, nbytes: int, holders: dict[int, int], meter: Meter) -> None:
        self.tensor = tensor
        self._address = address
        self._nbytes = nbytes
        self._holders = holders
        self._meter = meter
        holders[address] = holders.get(address, 0) + 1
        if holders[address] == 1:
            meter.add("activations", nbytes)

    def __del__(self) -> None:
        self._holders[self._address] -= 1
        if not self._holders[self._address]:
            del self._holders[self._address]
            self._meter.add("activations", -self._nbytes)
