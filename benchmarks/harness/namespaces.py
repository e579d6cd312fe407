"""A small cluster inside one machine: a network namespace for each rank, joined by a bridge. Needs root, on Linux.

    rank 0            switch             rank 1
    eth0 ────veth──── port0 ┐
    10.0.0.1                bridge
                      port1 ┘ ────veth──── eth0
                                           10.0.0.2

No namespace here has a name. Each lives by an open file descriptor, which forked ranks inherit; once the network is
closed and the ranks have ended, the kernel takes down namespaces, bridge and cables by itself. So nothing can be left
behind, not even by a process that is killed, and runs beside each other cannot clash.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

INTERFACE: Final = "eth0"
"""The interface of a rank, in its namespace."""

_NEW_NETWORK: Final = 0x40000000
"""CLONE_NEWNET of <sched.h>; Python has it from 3.12."""

_MTU: Final = 9000
"""Bytes: jumbo frames, as clusters use. Headers are then 0.7 % of the bytes at most."""

_QUEUE: Final = "400ms"
"""What waits in front of a shaped link before packets are dropped."""

_COMMAND_LIMIT: Final = 20.0
"""Seconds that `ip` or `tc` may take."""

_UNITS: Final = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class NetworkError(RuntimeError):
    """The kernel, `ip` or `tc` refused what the network needs."""


class Network:
    """A bridge with one cable and one namespace for each rank.

    Args:
        num_ranks: how many.
        rate: what each cable carries in each direction, in tc's notation ("100mbit"); None leaves them unshaped.

    Raises:
        NetworkError: if namespaces cannot be made here.
        ValueError: if the rate cannot be read.
    """

    def __init__(self, num_ranks: int, rate: str | None = None) -> None:
        shaper = None if rate is None else _token_bucket(rate)
        self._namespaces: list[int] = []
        try:
            with _staying_home():
                for _ in range(num_ranks):
                    self._namespaces.append(_new_namespace())
                self._namespaces.append(_new_namespace())
                # This thread is in the switch now.
                _configure("ip", ["link add bridge type bridge forward_delay 0 mcast_snooping 0"])
                _configure("ip", [line for rank in range(num_ranks) for line in self._cable(rank)])
                _configure("ip", ["link set bridge addrgenmode none up"])
                if shaper:
                    _configure("tc", [f"qdisc add dev port{rank} root {shaper}" for rank in range(num_ranks)])
                for rank in range(num_ranks):
                    self.enter(rank)
                    # Without IPv6 the only frames are the ranks' own and ARP.
                    up = f"link set {INTERFACE} addrgenmode none up"
                    _configure("ip", [up, f"address add {_address(rank)}/24 dev {INTERFACE}"])
                    if shaper:
                        _configure("tc", [f"qdisc add dev {INTERFACE} root {shaper}"])
        except BaseException:
            self.close()
            raise

    def enter(self, rank: int) -> None:
        """Move the calling thread, and what it starts from now on, into the namespace of ``rank``."""
        _enter(self._namespaces[rank])

    def close(self) -> None:
        """Let go of the namespaces. The kernel ends them with the last process inside."""
        while self._namespaces:
            os.close(self._namespaces.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _cable(self, rank: int) -> list[str]:
        there = f"/proc/{os.getpid()}/fd/{self._namespaces[rank]}"
        return [
            f"link add port{rank} mtu {_MTU} type veth peer name {INTERFACE} mtu {_MTU} netns {there}",
            f"link set port{rank} master bridge addrgenmode none up",
        ]


def bytes_sent() -> int:
    """Bytes that left by this namespace's interface so far: its tx_bytes, as in /sys/class/net/*/statistics.

    Read from /proc, which follows a process into its namespace; /sys shows the one in which it was mounted.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            transmitted = 8  # after the eight columns of what was received
            return int(counters.split()[transmitted])
    raise NetworkError(f"expected the interface {INTERFACE}: call bytes_sent in a rank that has entered its namespace")


def unavailable() -> str | None:
    """Why namespaces cannot be made here; None if they can. Tries it."""
    if sys.platform != "linux":
        return f"network namespaces need Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return f"network namespaces need root, this is user {os.geteuid()}: run it with sudo"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} was not found: install iproute2"
    try:
        Network(1, rate="1gbit").close()
    except (NetworkError, OSError) as error:
        return f"network namespaces cannot be made here (a container may forbid it): {error}"
    return None


def _token_bucket(rate: str) -> str:
    """The arguments of tc for a link of ``rate``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"a rate is a number and kbit, mbit or gbit, such as 100mbit; found {rate!r}")
    bytes_per_second = float(match[1]) * _UNITS[match[2]] / 8
    # Room for a few 64 KiB packets, which tbf would otherwise cut up, and for what passes between two timer ticks.
    burst = int(max(2**18, bytes_per_second * 0.01))
    return f"tbf rate {rate} burst {burst} latency {_QUEUE}"


@contextmanager
def _staying_home() -> Iterator[None]:
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        yield
    finally:
        _enter(home)
        os.close(home)


def _new_namespace() -> int:
    """Move this thread into a new network namespace, and return what keeps it alive."""
    _call("unshare", _NEW_NETWORK)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _enter(namespace: int) -> None:
    _call("setns", namespace, _NEW_NETWORK)


def _call(function: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise NetworkError(f"{function} failed: {os.strerror(number)}")


def _configure(tool: str, lines: list[str]) -> None:
    """Run ``lines`` with `ip` or `tc`, in the namespace of the calling thread."""
    done = subprocess.run(
        [tool, "-batch", "-"], input="\n".join(lines), text=True, capture_output=True, timeout=_COMMAND_LIMIT
    )
    if done.returncode != 0:
        raise NetworkError(f"{tool} refused {lines}: {done.stderr.strip()}")


def _address(rank: int) -> str:
    return f"10.0.0.{rank + 1}"
