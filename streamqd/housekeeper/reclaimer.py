"""Looking for entries that foreign consumers left pending.

It claims nothing: it raises a flag in the slot of the partition's worker, which claims them by a
fenced script. So nothing ever comes into an owner's hands behind its back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from streamqd import logs
from streamqd.config import Consumer
from streamqd.housekeeper.batch import run_commands
from streamqd.model import Unit
from streamqd.scoreboard import Slot
from streamqd.store.client import Link
from streamqd.store.keys import Keys

OUR_CONSUMER = b"w"  # the one consumer name of all owners: the fence says who owns


class Reclaimer:
    """Raises the flag in the slots of workers that have something to claim."""

    def __init__(self, link: Link, keys: Keys, consumers: Iterable[Consumer]) -> None:
        self._link = link
        self._keys = keys
        self._idle = {(each.topic, each.unit_group): each.reclaim_idle for each in consumers}

    @property
    def every(self) -> float:
        """Seconds between two looks: a quarter of the shortest idle time."""
        return min(15.0, max(1.0, min(self._idle.values(), default=60.0) / 4))

    def run(self, owned: Iterable[tuple[Slot, Unit]]) -> None:
        """Look at every owned unit once."""
        slots = [(slot, unit) for slot, unit in owned if (unit.topic, unit.group) in self._idle]
        places = [
            (slot, unit, key)
            for slot, unit in slots
            for key in (
                self._keys.source(*unit),
                self._keys.retry_stream(*unit),
            )
        ]
        listed = self._ask([("XINFO", "CONSUMERS", key, unit.group) for _, unit, key in places])
        foreign = [
            (slot, unit, key, name)
            for (slot, unit, key), consumers in zip(places, listed, strict=True)
            if isinstance(consumers, list)
            for name in _foreign(consumers)
        ]
        idle = self._ask(
            [
                ("XPENDING", key, unit.group, "IDLE", self._idle_ms(unit), "-", "+", 1, name)
                for _, unit, key, name in foreign
            ]
        )
        for (slot, unit, _, name), entries in zip(foreign, idle, strict=True):
            # A flag that is up already says it all; the worker takes it down when nothing is left.
            if (
                isinstance(entries, list)
                and entries
                and (slot.reclaim_requested == slot.reclaim_done)
            ):
                slot.reclaim_requested = slot.reclaim_done + 1
                logs.event("reclaim.requested", unit=unit, consumer_name=name)

    def _idle_ms(self, unit: Unit) -> int:
        return round(self._idle[unit.topic, unit.group] * 1000)

    def _ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        return run_commands(self._link, commands)


def _foreign(consumers: list[Any]) -> list[bytes]:
    """Names of consumers other than ours that hold entries, from XINFO CONSUMERS."""
    found = []
    for flat in consumers:
        info = dict(zip(flat[::2], flat[1::2], strict=False))
        if info[b"name"] != OUR_CONSUMER and info[b"pending"]:
            found.append(info[b"name"])
    return found
