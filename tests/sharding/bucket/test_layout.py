"""Layout: every element of every parameter lies in exactly one slice. Oracle: marking elements one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onecopy.memory.strides import memory_order
from onecopy.sharding.bucket.layout import ALIGNMENT, Cut, Layout
from onecopy.sharding.tensor.sliced import dense_strides, flatten

shapes = st.lists(st.lists(st.integers(0, 7), max_size=4).map(tuple), min_size=1, max_size=8)
multiples = st.sampled_from([ALIGNMENT, 2 * ALIGNMENT, 3 * ALIGNMENT])


@given(numels=st.lists(st.integers(0, 300), min_size=1, max_size=12), num_slices=st.integers(1, 9), multiple=multiples)
def test_slices_cover_every_element_exactly_once(numels: list[int], num_slices: int, multiple: int) -> None:
    layout = Layout(tuple(numels), num_slices, multiple)
    counts = [torch.zeros(numel, dtype=torch.int64) for numel in numels]
    for rank in range(num_slices):
        taken = torch.zeros(layout.slice_numel, dtype=torch.int64)
        for count, segment in zip(counts, layout.segments(rank), strict=True):
            count[segment.parameter_start : segment.parameter_start + segment.numel] += 1
            taken[segment.slice_start : segment.slice_start + segment.numel] += 1
        assert taken.max() <= 1, "two parameters share an element of the slice"
    assert all((count == 1).all() for count in counts)


@given(numels=st.lists(st.integers(0, 300), min_size=1, max_size=12), num_slices=st.integers(1, 9), multiple=multiples)
def test_padding_is_bounded_and_starts_are_aligned(numels: list[int], num_slices: int, multiple: int) -> None:
    layout = Layout(tuple(numels), num_slices, multiple)
    # Closed form: less than one alignment for each parameter, less than one multiple for each slice.
    assert sum(numels) <= layout.padded_numel < sum(numels) + ALIGNMENT * len(numels) + multiple * num_slices + 1
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    assert layout.slice_numel % multiple == 0
    assert layout.padded_numel == layout.slice_numel * num_slices


@given(shapes=shapes, num_slices=st.integers(1, 5))
def test_slices_put_together_are_the_parameters(shapes: list[tuple[int, ...]], num_slices: int) -> None:
    """Oracle: the tensors that were cut."""
    tensors = [torch.randn(shape) for shape in shapes]
    layout = Layout(tuple(t.numel() for t in tensors), num_slices)
    flat = torch.full((layout.padded_numel,), float("nan"))
    for tensor, offset in zip(tensors, layout.offsets, strict=True):
        flat[offset : offset + tensor.numel()] = tensor.flatten()
    for position, tensor in enumerate(tensors):
        pieces = []
        for rank in range(num_slices):
            segment = layout.segment(position, rank)
            start = rank * layout.slice_numel + segment.slice_start
            pieces.append(flat[start : start + segment.numel])
        assert torch.equal(torch.cat(pieces), tensor.flatten())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5),
        torch.randn(3, 5).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.randn(6, 6)[::2, ::3],
        torch.randn(4, 1).expand(4, 3),
        torch.randn(()),
        torch.randn(0, 3),
        torch.randn(1, 5, 1),
    ],
    ids=["plain", "transposed", "channels_last", "permuted", "strided", "expanded", "scalar", "empty", "ones"],
)
def test_flatten_follows_dense_memory_and_inverts(tensor: torch.Tensor) -> None:
    """Oracle: the tensor itself, seen again through its dense strides."""
    strides = dense_strides(tensor)
    assert sorted(memory_order(strides)) == list(range(tensor.dim()))
    assert torch.equal(flatten(tensor, strides).as_strided(tensor.shape, strides), tensor)


def test_transposed_weight_keeps_its_strides_and_expanded_one_becomes_contiguous() -> None:
    assert dense_strides(torch.randn(3, 5).t()) == (1, 5)
    assert dense_strides(torch.randn(4, 1).expand(4, 3)) in {(3, 1), (1, 4)}


@given(numels=st.lists(st.integers(0, 40), min_size=1, max_size=12), num_slices=st.integers(1, 5))
def test_a_cut_takes_the_same_memory_as_a_view_for_each(numels: list[int], num_slices: int) -> None:
    """Oracle: Python's slicing of each segment and of each parameter."""
    layout = Layout(tuple(numels), num_slices)
    flat = torch.arange(layout.padded_numel)
    expected = [flat[start : start + numel] for start, numel in zip(layout.offsets, numels, strict=True)]
    assert [part.tolist() for part in layout.split(flat)] == [part.tolist() for part in expected]
    for rank in range(num_slices):
        spans = [(segment.slice_start, segment.numel) for segment in layout.segments(rank)]
        own = flat[rank * layout.slice_numel : (rank + 1) * layout.slice_numel]
        parts = Cut(spans, layout.slice_numel)(own)
        assert [part.tolist() for part in parts] == [own[start : start + numel].tolist() for start, numel in spans]
