"""Activations: what `onecopy.shard` is told about activation checkpoints, and the modules that it means."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from torch import nn

from onecopy.activations.checkpoint import checkpoint_over
from onecopy.activations.kept import Store
from onecopy.activations.selective import Selective
from onecopy.activations.store import check_offload
from onecopy.comm.mesh import Axis
from onecopy.errors import SettingsError
from onecopy.memory.arena import Arena
from onecopy.observe.meter import Meter

_CHECKPOINTS: Final = ("none", "units", "selective")


@dataclass(frozen=True)
class Activations:
    """How activations are kept from forward to backward.

    Attributes:
        checkpoint: "units" keeps only the inputs of units, and computes each unit again in backward; this costs about
            a third more compute. "selective" keeps the outputs of matrix products, convolutions and fused attention as
            well, and computes only the rest again. "none" leaves activations to the model.
        partition: whether an input that all ranks of the tensor axis hold alike is cut over that axis (P_a in ZeRO).
        offload: where inputs are kept. None: on their device. "cpu": in host memory (P_a+cpu in ZeRO). Or the path of
            a directory, which may be that of `Offload`: each rank has one file there, for both.
    """

    checkpoint: str = "units"
    partition: bool = True
    offload: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.checkpoint not in _CHECKPOINTS:
            close = get_close_matches(str(self.checkpoint), _CHECKPOINTS, n=1, cutoff=0.0)
            raise SettingsError(
                f'Activations.checkpoint must be "units", "selective" or "none"; found {self.checkpoint!r}, did you '
                f"mean {close[0]!r}?"
            )
        if self.checkpoint == "none" and self.offload is not None:
            raise SettingsError('Activations.offload moves checkpoints, of which checkpoint="none" makes none.')
        if self.checkpoint == "selective" and self.offload is not None:
            raise SettingsError(
                'Activations.offload moves the inputs of units. checkpoint="selective" keeps the outputs of their '
                "matrix products too, which are several times larger and stay on the device: use "
                'checkpoint="units", or leave offload away.'
            )

    def check(self) -> None:
        """Raise `SettingsError` for an ``offload`` that cannot work, before a model is changed."""
        check_offload(self.offload)

    def check_units(self, scopes: Iterable[tuple[str, nn.Module]]) -> None:
        """See that units of these names can be checkpointed, before a model is changed.

        Raises:
            SettingsError: if outputs are to be kept inside a unit that contains another one. That one's parameters are
                gathered inside the recomputation, whose operations must be those of the forward, one by one.
        """
        if self.checkpoint != "selective":
            return
        scopes = list(scopes)
        for outer, _ in _outermost(scopes):
            if inner := next((name for name, _ in scopes if name.startswith(f"{outer}.")), None):
                raise SettingsError(
                    f'Activations.checkpoint="selective" needs units without units inside; found {inner!r} inside '
                    f"{outer!r}. Name the units in units=, either the outer or the inner ones, or use "
                    f'checkpoint="units".'
                )

    def apply(
        self,
        scopes: Iterable[tuple[str, nn.Module]],
        tensor: Axis,
        store: Store,
        meter: Meter,
        arena: Arena | None,
    ) -> None:
        """Checkpoint units.

        Left out are the root, which would compute everything again; single layers, which keep their inputs anyway; and
        units inside of a unit that is checkpointed.

        Args:
            scopes: units by name, outer ones first.
            tensor: the tensor axis.
            store: where inputs are kept: one for all units, so that each finds what the one before it has kept.
            meter: where the bytes are counted that selective recomputation keeps.
            arena: where inputs that stay on the device are kept; None takes memory for them from PyTorch.
        """
        if self.checkpoint == "none":
            return
        axis = tensor if self.partition else tensor.alone()
        kept_on_device = arena if self.offload is None else None
        selective = Selective(meter) if self.checkpoint == "selective" else None
        for name, scope in _outermost(scopes):
            checkpoint_over(scope, axis, store, unit=name, arena=kept_on_device, selective=selective)


def _outermost(scopes: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Without the root, single layers, and units inside of others; outer ones come first."""
    done: list[str] = []
    for name, scope in scopes:
        inside = any(name.startswith(f"{outer}.") for outer in done)
        if name and not inside and next(scope.children(), None) is not None:
            yield name, scope
            done.append(name)
