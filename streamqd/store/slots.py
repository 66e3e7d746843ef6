"""Determine which node of a Redis Cluster serves a command. This module does no I/O."""

from __future__ import annotations

from binascii import crc_hqx
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from streamqd.config.topology import Address

SLOTS = 16_384

# The position of the key in a command. For a command that is not listed here, it is 1.
_KEY_AT = {"EVAL": 3, "EVALSHA": 3, "MEMORY": 2, "OBJECT": 2, "XGROUP": 2, "XINFO": 2}
_KEY_AFTER_STREAMS = frozenset({"XREAD", "XREADGROUP"})
_NO_KEY = (
    "ACL ASKING CLIENT CLUSTER COMMAND CONFIG DBSIZE DISCARD ECHO EXEC FLUSHALL FLUSHDB HELLO INFO"
    " LATENCY MULTI PING ROLE SCAN SCRIPT SLOWLOG TIME UNWATCH WAIT"
)
_KEYLESS = frozenset(_NO_KEY.split())


def key_slot(key: str | bytes) -> int:
    """Return the slot of a key. If the key has a hash tag, the slot depends only on the tag."""
    name = key.encode() if isinstance(key, str) else key
    _, brace, rest = name.partition(b"{")
    tag, end, _ = rest.partition(b"}")
    return crc_hqx(tag if brace and end and tag else name, 0) % SLOTS


def routing_key(command: Sequence[Any]) -> str | bytes | None:
    """Return the key that determines the node for a command, or None if any node may run it."""
    name = str(command[0]).upper()
    if name in _KEYLESS:
        return None
    at = _KEY_AT.get(name, 1)
    if name in _KEY_AFTER_STREAMS:
        at = 1 + next(i for i, part in enumerate(command) if str(part).upper() == "STREAMS")
    key: str | bytes | None = command[at] if at < len(command) else None
    return key


class Redirect(NamedTuple):
    """The node to which a command is redirected.

    If `asking` is True, the redirect applies only to this command, which must be sent after ASKING.
    """

    address: Address
    asking: bool


def parse_redirect(text: str, asked: Address) -> Redirect | None:
    """Parse an error of the form `MOVED slot host:port` or `ASK slot host:port`.

    Return None for any other error. `asked` is the node that returned the error. If the error
    contains no host, because the node does not know its own name, the target has the same host.
    """
    parts = text.split()
    if len(parts) < 3 or parts[0] not in ("MOVED", "ASK"):
        return None
    host, _, port = parts[2].rpartition(":")
    return Redirect(Address(host.strip("[]") or asked.host, int(port)), parts[0] == "ASK")


class SlotMap:
    """The master of each slot, according to one node of the cluster."""

    def __init__(self, ranges: Iterable[tuple[int, int, Address]]) -> None:
        """Build the map from tuples of a first slot, a last slot and their master."""
        self.ranges = sorted(ranges)
        self._firsts = [first for first, _, _ in self.ranges]

    @classmethod
    def parse(cls, reply: Sequence[Any], asked: Address) -> SlotMap:
        """Parse the reply to CLUSTER SLOTS from the node at `asked`."""
        ranges = []
        for first, last, master, *_ in reply:
            host = (master[0] or b"").decode()
            known = host if host not in ("", "?") else asked.host
            ranges.append((int(first), int(last), Address(known, int(master[1]))))
        return cls(ranges)

    @property
    def masters(self) -> list[Address]:
        """All masters that serve slots, ordered by their first slot."""
        return list(dict.fromkeys(address for _, _, address in self.ranges))

    def master_for_slot(self, slot: int) -> Address | None:
        """Return the master of a slot, or None if no node serves the slot."""
        at = bisect_right(self._firsts, slot) - 1
        if at < 0 or slot > self.ranges[at][1]:
            return None
        return self.ranges[at][2]

    def with_redirect(self, slot: int, to: Address) -> SlotMap:
        """Return a copy of the map in which one slot belongs to another node."""
        ranges = []
        for first, last, address in self.ranges:
            if not first <= slot <= last:
                ranges.append((first, last, address))
                continue
            if first < slot:
                ranges.append((first, slot - 1, address))
            if slot < last:
                ranges.append((slot + 1, last, address))
        return SlotMap([*ranges, (slot, slot, to)])
