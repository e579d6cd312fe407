"""ArrivedGradients: what autograd has computed for one bucket, on its way out.

The gradients stay the separate tensors that autograd made until they have been copied into buffers that are sent
(`comm/outgoing.py`); each goes with its last piece.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from onecopy.sharding.bucket.layout import Layout


class ArrivedGradients:
    """A source of what is sent.

    Args:
        layout: where parameters lie in the bucket.
        gradients: for each parameter its gradient, flattened as the bucket holds it; None sends zeros.
        dtype: in which they travel.
        device: where they are.
        on_release: called with the bytes of gradients that were let go.
    """

    def __init__(
        self,
        layout: Layout,
        gradients: Sequence[Tensor | None],
        dtype: torch.dtype,
        device: torch.device,
        on_release: Callable[[int], None],
    ) -> None:
        self.numel = layout.padded_numel
        self.dtype = dtype
        self.device = device
        self._layout = layout
        self._gradients = list(gradients)
        self._left = list(layout.numels)
        self._on_release = on_release

    @torch.no_grad()
    def copy_to(self, piece: Tensor, start: int) -> None:
        """Fill the 1-D ``piece`` with the elements from ``start`` on, cast to its dtype. Padding stays undefined."""
        if piece.numel() == self.numel:
            self._copy(self._layout.split(piece), self._gradients)
            return
        offsets, numels = self._layout.offsets, self._layout.numels
        stop = start + piece.numel()
        targets: list[Tensor] = []
        sources: list[Tensor | None] = []
        for index in range(max(bisect_right(offsets, start) - 1, 0), len(offsets)):
            offset, gradient = offsets[index], self._gradients[index]
            low, high = max(start, offset), min(stop, offset + numels[index])
            if low < high:
                targets.append(piece[low - start : high - start])
                sources.append(None if gradient is None else gradient[low - offset : high - offset])
                self._left[index] -= high - low
            elif offset >= stop:
                break
        self._copy(targets, sources)
        del sources
        self._release([index for index, left in enumerate(self._left) if not left])

    def close(self) -> None:
        """All has been copied out: autograd's tensors may go."""
        self._release(range(len(self._gradients)))

    def _release(self, indices: Iterable[int]) -> None:
        nbytes = 0
        for index in indices:
            if (gradient := self._gradients[index]) is not None:
                nbytes += gradient.nbytes
                self._gradients[index] = None
        if nbytes:
            self._on_release(nbytes)

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
