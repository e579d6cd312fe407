"""Where DeepSpeed keeps the elements of each parameter, and putting them together; read from its checkpoints.

stages 1, 2    a group's parameters end to end, cut into one part for each rank
stage 3        each parameter cut into equal parts, the last one padded; a rank has its parts end to end
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onecopy.checkpoint.optimizer import IMPLEMENTATION
from onecopy.errors import CheckpointError


@dataclass(frozen=True)
class Place:
    """Where a parameter lies: its group, and its first element in what `FlatStates` calls the group's run."""

    group: int
    start: int
    shape: torch.Size


class FlatStates:
    """The flat fp32 weights and states of all ranks.

    A group's run is all its parameters end to end: over all ranks (stages 1, 2), or what each rank has of it (stage 3).

    Args:
        weights: of each rank, a list of flat tensors.
        states: of each rank, one dict of states for each flat tensor.
        groups: the optimizer's, with hyperparameters.
        stage: how they are cut.
    """

    def __init__(
        self,
        weights: Sequence[Sequence[Tensor]],
        states: Sequence[Sequence[Mapping[str, Any]]],
        groups: Sequence[Mapping[str, Any]],
        stage: int,
    ) -> None:
        self._weights = weights
        self._states = states
        self._groups = groups
        self._stage = stage

    def weight(self, place: Place) -> Tensor:
        """The whole weight."""
        return self._take([list(rank) for rank in self._weights], place)

    def state(self, name: str, place: Place) -> Tensor:
        """One whole state of a parameter."""
        return self._take([[state[name] for state in rank] for rank in self._states], place)

    @property
    def state_names(self) -> list[str]:
        """The states that have a parameter's size."""
        states, weight = self._states[0][0], self._weights[0][0]
        return [key for key, value in states.items() if isinstance(value, Tensor) and value.shape == weight.shape]

    def describe(self, names: Sequence[Sequence[str]]) -> dict[str, Any]:
        """The optimizer's groups and counters as onecopy saves them.

        Args:
            names: the parameters of each flat tensor; stage 3 may have several of these for one group.
        """
        groups, small = [], {}
        for group in self._groups:
            values = {key: value for key, value in group.items() if key not in (*IMPLEMENTATION, "step")}
            groups.append({"names": [name for number in group["params"] for name in names[number]], "values": values})
            for number in group["params"]:
                step = self._states[0][number].get("step", group.get("step"))
                if step is not None:
                    small.update({name: {"step": torch.tensor(float(step))} for name in names[number]})
        return {"kind": None, "groups": groups, "states": small}

    def _take(self, ranks: list[list[Tensor]], place: Place) -> Tensor:
        if self._stage == 3:
            count = -(-place.shape.numel() // len(ranks))
            parts = [run for flats in ranks for run in _run(flats, place.start, count)]
        else:
            parts = list(_run([flats[place.group] for flats in ranks], place.start, place.shape.numel()))
        return join(parts, place.shape).float()


def _run(flats: Sequence[Tensor], start: int, count: int) -> Iterator[Tensor]:
    """Elements of flat tensors laid end to end."""
    for flat in flats:
        low, high = max(0, start), min(flat.numel(), start + count)
        if low < high:
            yield flat[low:high]
        start -= flat.numel()


def join(parts: Sequence[Tensor], shape: torch.Size) -> Tensor:
    whole = torch.cat([part.reshape(-1) for part in parts])[: shape.numel()]
    if whole.numel() != shape.numel():
        raise CheckpointError(
            f"a tensor of shape {tuple(shape)} has {whole.numel()} elements in DeepSpeed's files, which is not the "
            "number that its shape needs"
        )
    return whole.view(shape)


def find_places(groups: Sequence[Mapping[str, torch.Size]], ranks: int, stage: int) -> dict[str, Place]:
    places: dict[str, Place] = {}
    position = 0
    for number, shapes in enumerate(groups):
        # At stage 3 all groups' parts follow each other in one run.
        position = position if stage == 3 else 0
        for name, shape in shapes.items():
            places[name] = Place(number, position, torch.Size(shape))
            numel = torch.Size(shape).numel()
            position += -(-numel // ranks) if stage == 3 else numel
    return places
