"""Models whose forwards take, return or change tensors in unusual ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import Chain


class InDicts(nn.Module):
    """Modules and parameters in every container that torch has, one list inside the other."""

    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ModuleDict({"a": nn.Linear(10, 10), "b": nn.Linear(10, 10)})
        self.nested = nn.ModuleList(nn.ModuleList(nn.Linear(10, 10) for _ in range(2)) for _ in range(2))
        self.values = nn.ParameterList([torch.randn(10), torch.randn(10)])
        self.by_name = nn.ParameterDict({"shift": torch.randn(10)})
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.named["b"](self.named["a"](x)))
        for layers in self.nested:
            for layer in layers:
                x = x + torch.tanh(layer(x))
        return F.mse_loss(self.head(x * self.values[0] + self.values[1] - self.by_name["shift"]), y)


@dataclass
class Hidden:
    """What a block returns: tensors in a dataclass, a dict, a tuple and a list."""

    state: Tensor
    extras: dict[str, Any]


class Signatures(nn.Module):
    """Blocks with keyword arguments, defaults and nested outputs."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(10, 10)

        def forward(self, *, hidden: Hidden, scale: float = 2.0, flag: bool | None = None) -> Hidden:
            assert flag is None
            out = torch.tanh(self.linear(hidden.state) * scale)
            return Hidden(hidden.state + out, {"all": (out, [out * 2, {"deep": out * 3}]), "name": "inner"})

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Inner() for _ in range(3))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = Hidden(x, {})
        loss = x.new_zeros(())
        for layer in self.layers:
            hidden = layer(hidden=hidden, scale=1.5)
            first, (second, third) = hidden.extras["all"]
            loss = loss + 0.1 * (first.square().mean() + second.mean() - third["deep"].mean())
        return loss + F.mse_loss(self.head(hidden.state), y)


class WritesToArguments(nn.Module):
    """Blocks return nothing: they write to a list, a dict and a dataclass that they were given."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(10, 10)

        def forward(self, seen: list[Tensor], named: dict[str, Tensor], hidden: Hidden) -> None:
            seen.append(torch.tanh(self.linear(seen[-1])))
            named["sum"] = named["sum"] + seen[-1]
            hidden.state = hidden.state * seen[-1]
            hidden.extras.setdefault("all", []).append(self.linear(hidden.state))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Inner() for _ in range(3))
        self.entry = nn.Linear(10, 10)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.entry(x)
        seen, named, hidden = [x], {"x": x, "sum": x}, Hidden(x, {})
        for layer in self.layers:
            layer(seen, named, hidden=hidden)
        assert len(seen) == len(hidden.extras["all"]) + 1 == 4
        assert seen[0] is named["x"] is x
        return F.mse_loss(self.head(torch.stack(seen).sum(0) + named["sum"] + hidden.state), y)


class OnlyDeepOutput(nn.Module):
    """The loss reaches a block through nothing but the deepest tensor of its nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Signatures.Inner() for _ in range(2))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(hidden=Hidden(x, {})).extras["all"][1][1]["deep"]
        return F.mse_loss(self.head(x), y)


class InPlaceFirst(Chain):
    """Blocks whose first operation writes to their input."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(10, 10)))


class InPlaceAfter(nn.Module):
    """What a block returned is written to by its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).mul_(0.5).add_(x)
        return F.mse_loss(self.head(x), y)


class Recursive(nn.Module):
    """A block that calls itself."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(10, 10)

        def forward(self, x: Tensor, depth: int) -> Tensor:
            x = torch.tanh(self.linear(x))
            return x + self(x, depth - 1) if depth else x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(2))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, 2)
        return F.mse_loss(self.head(x), y)


class NoInputGradient(nn.Module):
    """Blocks whose inputs need no gradient, two of them side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return sum(F.mse_loss(tower(x), y) for tower in self.towers)


class ParameterReturned(nn.Module):
    """A block returns its parameter, and the model uses another's weight directly."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(10, 10) / 3)

        def forward(self) -> Tensor:
            return self.weight

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(2))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(x @ block())
        return F.mse_loss(self.head(x), y)
