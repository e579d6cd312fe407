"""Time: seconds of computing and of collectives in a step, and how much of the latter shows.

Ring model: gathering or reduce-scattering S bytes takes N - 1 rounds of S/N bytes, (N-1)(α + S/(N·bw)); an all-reduce
is both. Computing is 6 floating-point operations for each parameter and token, 8 with full recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onecopy.stage import Stage


class Link(NamedTuple):
    """What carries collectives.

    Attributes:
        bandwidth: bytes a second that each rank can send.
        latency: α, seconds that a round costs whatever it carries.
    """

    bandwidth: float
    latency: float = 5e-6


def gather_seconds(nbytes: float, ranks: int, link: Link) -> float:
    """Seconds of an all-gather (or reduce-scatter) of ``nbytes``, whole, over a ring."""
    return (ranks - 1) * (link.latency + nbytes / (ranks * link.bandwidth))


def all_reduce_seconds(nbytes: float, ranks: int, link: Link) -> float:
    """Seconds of an all-reduce: a reduce-scatter and an all-gather."""
    return 2 * gather_seconds(nbytes, ranks, link)


def step_flops(
    parameters: float,
    tokens: float,
    *,
    recompute: bool = False,
    layers: int = 0,
    hidden: int = 0,
    sequence: int = 0,
) -> float:
    """Floating-point operations of a step: 6Ψ a token (8Ψ with full recomputation), and 12·L·h·s for attention scores.

    Source: ZeRO-Infinity (2·4·Ψ·tokens with recomputation).
    """
    per_token = 6.0 * parameters + 12.0 * layers * hidden * sequence
    return per_token * tokens * (4 / 3 if recompute else 1.0)


def repeated_traffic(repeated: float) -> float:
    """Bytes of memory traffic of what selective recomputation computes again: norms, activation functions, dropout.

    Such operations wait for memory. Each result is written, and two of its size are read for it: most take two inputs
    (a product or a residual, and a gate, a mask or statistics). That it is two is an assumption.

    Args:
        repeated: bytes of the results.
    """
    return 3 * repeated


class StepSeconds(NamedTuple):
    """Seconds of one step.

    Attributes:
        compute: forward and backward of all micro-batches, recomputation included.
        communication: collectives of model states, whether they hide or not.
        exposed: seconds of them in which nothing is computed.
        update: the optimizer's step.
        transfer: what offloading adds and cannot hide.
        tensor: messages of tensor parallelism and of partitioned checkpoints, all of which computing waits for.
        between_copies: the part of ``exposed`` that the copies of the model states cost each other.
    """

    compute: float
    communication: float
    exposed: float
    update: float = 0.0
    transfer: float = 0.0
    tensor: float = 0.0
    between_copies: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.update + self.transfer + self.tensor


def overlap(
    stage: int,
    bucket_bytes: Sequence[tuple[float, float]],
    compute: float,
    *,
    shard: int,
    replicate: int = 1,
    micro_batches: int = 1,
    link: Link,
    replicate_link: Link | None = None,
    recompute: bool = False,
    hidden_share: float = 1.0,
) -> StepSeconds:
    """Seconds of a step whose collectives hide behind computing where the engine lets them.

    ===========================  =======================  ==============================
    collective                   stages                   hides behind
    ===========================  =======================  ==============================
    all-reduce of gradients      0                        the last micro-batch's backward
    reduce-scatter               1: once; 2, 3: each      the same micro-batch's backward
    gather after the step        1, 2                     the first micro-batch's forward
    gathers of each micro-batch  3                        its forward; its backward
    ===========================  =======================  ==============================

    Args:
        bucket_bytes: for each bucket, its bytes as gathered and as reduced.
        compute: seconds of forward and backward of all micro-batches.
        shard: N; 1 at stage 0, where all ranks are ``replicate``.
        replicate: copies of the model states.
        link: of the shard axis (of all ranks at stage 0).
        replicate_link: of the replicate axis, ``link`` if not given.
        recompute: backward computes forward once more.
        hidden_share: the share of computing behind which messages can really hide; 1 is the ideal.
    """
    kind = Stage.of(stage)
    other = replicate_link or link
    per_micro = compute / micro_batches
    forward = per_micro / (4 if recompute else 3)
    backward = per_micro - forward
    gather = sum(gather_seconds(gathered, shard, link) for gathered, _ in bucket_bytes)
    reduce = sum(
        gather_seconds(reduced, shard, link) + all_reduce_seconds(reduced / shard, replicate, other)
        for _, reduced in bucket_bytes
    )
    if not kind.shards_optimizer:
        ranks = shard * replicate
        total = sum(all_reduce_seconds(reduced, ranks, link) for _, reduced in bucket_bytes)
        return StepSeconds(compute, total, max(0.0, total - hidden_share * backward))
    reduces = micro_batches if kind.shards_gradients else 1
    if kind.shards_parameters:
        in_forward = max(0.0, gather - hidden_share * forward)
        in_backward = max(0.0, gather + reduce - hidden_share * backward)
        return StepSeconds(compute, micro_batches * (2 * gather + reduce), micro_batches * (in_forward + in_backward))
    exposed = max(0.0, gather - hidden_share * forward) + reduces * max(0.0, reduce - hidden_share * backward)
    return StepSeconds(compute, gather + reduces * reduce, exposed)


def hiding_tokens(flops: float, bandwidth: float, *, element_bytes: float = 2, flops_per_element: float = 2) -> float:
    """Tokens a rank must compute in a micro-batch for stage 3's gathers to hide: utilised FLOP/s over bytes/s.

    A parameter's gather takes 2/bw seconds and its forward 2·tokens/FLOPs; backward does twice the work for twice the
    traffic, so that its threshold is the same. About 2,200 to 2,500 on H100s joined by NVLink (busbw 361 GB/s).

    Args:
        flops: utilised floating-point operations a second.
        bandwidth: bytes a second of the collective on each rank.
    """
    return flops * element_bytes / (flops_per_element * bandwidth)
