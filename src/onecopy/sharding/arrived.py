"""ArrivedGradients: what autograd has computed for one bucket, on its way out.

The gradients stay the separate tensors that autograd made until each of their pieces has been copied into a buffer
that is sent (`comm/outgoing.py`); then they go all at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onecopy.sharding.layout import Layout


class ArrivedGradients:
    """A source of what is sent.

    Args:
        layout: where parameters lie in the bucket.
        gradients: for each parameter its gradient, flattened as the bucket holds it; None sends zeros.
        dtype: in which they travel.
        device: where they are.
        on_close: called when they have been copied out and let go.
    """

    def __init__(
        self,
        layout: Layout,
        gradients: Sequence[Tensor | None],
        dtype: torch.dtype,
        device: torch.device,
        on_close: Callable[[], None],
    ) -> None:
        self.numel = layout.padded_numel
        self.dtype = dtype
        self.device = device
        self._layout = layout
        self._gradients = gradients
        self._on_close = on_close

    @torch.no_grad()
    def copy_to(self, piece: Tensor, start: int) -> None:
        """Fill the 1-D ``piece`` with the elements from ``start`` on, cast to its dtype. Padding stays undefined."""
        if piece.numel() == self.numel:
            self._copy(self._layout.split(piece), self._gradients)
            return
        offsets, numels = self._layout.offsets, self._layout.numels
        stop = start + piece.numel()
        targets, sources = [], []
        for index in range(bisect_right(offsets, start) - 1, len(offsets)):
            offset, gradient = offsets[index], self._gradients[index]
            low, high = max(start, offset), min(stop, offset + numels[index])
            if low < high:
                targets.append(piece[low - start : high - start])
                sources.append(None if gradient is None else gradient[low - offset : high - offset])
            elif offset >= stop:
                break
        self._copy(targets, sources)

    def close(self) -> None:
        """All has been copied out: autograd's tensors may go."""
        self._gradients = ()
        self._on_close()

    @staticmethod
    def _copy(targets: list[Tensor], sources: Sequence[Tensor | None]) -> None:
        present = [source for source in sources if source is not None]
        if len(present) < len(sources):
            for target, source in zip(targets, sources, strict=True):
                if source is None:
                    target.zero_()
            targets = [target for target, source in zip(targets, sources, strict=True) if source is not None]
        if present:
            torch._foreach_copy_(targets, present)
