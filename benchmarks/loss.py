"""The loss of a language model's head: peak of live tensors and seconds, whole, by PyTorch in chunks, and by onecopy's.

    python benchmarks/loss.py
    python benchmarks/loss.py --tokens 2048 --hidden 512 --words 16000 --dtype bfloat16

Live tensors are those that operations show: what PyTorch's chunked operator holds inside of itself is not counted. The
targets are half of the peak, and 3 % of time at the most.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor, nn

import onecopy
from harness.alive import Alive


def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """As transformers' ForCausalLMLoss."""
    return nn.functional.cross_entropy((hidden @ weight.T).float(), labels)


def torchs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """PyTorch's own, with its own choice of chunks."""
    return nn.functional.linear_cross_entropy(hidden, weight, labels, options=nn.LinearCrossEntropyOptions())


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "whole": whole,
    "torch, in chunks": torchs,
    "onecopy, in chunks": onecopy.chunked_cross_entropy,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--words", type=int, default=16_000)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    # Threads that wait for each other on a busy machine would be what is measured.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = getattr(torch, given.dtype)
    values = torch.randn(given.tokens, given.hidden).to(dtype), (torch.randn(given.words, given.hidden) / 50).to(dtype)
    labels = torch.randint(0, given.words, (given.tokens,))
    print(f"{given.tokens} tokens, {given.hidden} features, {given.words} words, {given.dtype}")
    least: dict[str, float] = {}
    # In turn, so that what else the machine does falls on all.
    for _ in range(given.repeats):
        for name, loss in LOSSES.items():
            hidden, weight = (value.clone().requires_grad_() for value in values)
            start = perf_counter()
            loss(hidden, weight, labels).backward()
            least[name] = min(least.get(name, float("inf")), perf_counter() - start)
    for name, loss in LOSSES.items():
        hidden, weight = (value.clone().requires_grad_() for value in values)
        with Alive(hidden, weight) as alive:
            found = loss(hidden, weight, labels)
            found.backward()
        print(f"  {name:<20}{least[name]:8.3f} s{alive.most / 1e6:10.1f} MB   loss {found.item():.4f}")


if __name__ == "__main__":
    main()
