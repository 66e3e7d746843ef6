"""Conservation: at every instant each message is in exactly one place, acknowledged, or counted.

    sent = acknowledged + dead + pending + delayed + retry + unread + dropped and counted

`Conservation.check` reads the places of all messages of a group on a partition by one script that
writes nothing (whereabouts.lua), and compares them with the ledger: what is in no place must have
been handled well, for nothing else may be acknowledged; what was settled once never comes back; and
the epoch of the fence never falls.

Where a limit lets messages be lost (`drops`), as many may be in no place and not handled as the
same script finds counted, and no fewer than were lost unread, which nobody can have handled. What
may expire (`expiring`) may be acknowledged unhandled too; what the product counts of that is for
the caller to compare with `unhandled`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from streamqd.errors import RedisRefused
from streamqd.model import Unit
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from tests.support.ledger import Ledger, Record

SCRIPT = Path(__file__).with_name("whereabouts.lua").read_text()
PLACES = ("unread", "pending", "delayed", "retry unread", "retry pending", "dead", "scheduled")


class Whereabouts(NamedTuple):
    """Where the messages of a unit are: number -> places, several when something is wrong.

    `lost_unread` and `lost_pending` are those that a limit has taken, as the product counts them.
    """

    epoch: int
    places: dict[str, list[str]]
    charges: dict[str, int]  # number -> crashes
    lost_unread: int
    lost_pending: int

    @property
    def ghosts(self) -> int:
        """Pending entries without a body: a limit has taken it, and they are not counted yet."""
        return self.places.get("?", []).count("pending")

    @property
    def lost(self) -> int:
        """All that a limit has taken."""
        return self.lost_unread + self.lost_pending + self.ghosts

    @classmethod
    def parse(cls, reply: list[Any]) -> Whereabouts:
        epoch, lost, flat, *lists = reply
        charges: dict[str, int] = {}
        for number, crashes in zip(flat[::2], flat[1::2], strict=True):
            charges[number.decode()] = max(crashes, charges.get(number.decode(), 0))
        places: dict[str, list[str]] = {}
        for name, numbers in zip(PLACES, lists, strict=True):
            for number in numbers:
                places.setdefault(number.decode(), []).append(name)
        return cls(int(epoch), places, charges, *(int(each or 0) for each in lost))


def look(link: Connection, keys: Keys, units: Iterable[Unit]) -> dict[Unit, Whereabouts]:
    """Take a picture of each unit. Raises RedisRefused, RedisUnavailable."""
    units = list(units)
    found = {}
    for unit, reply in zip(units, link.pipeline([_call(keys, u) for u in units]), strict=True):
        if isinstance(reply, RedisRefused):
            raise reply
        found[unit] = Whereabouts.parse(reply)
    return found


def _call(keys: Keys, unit: Unit) -> tuple[str | int, ...]:
    names = (
        keys.stream(unit.topic, unit.partition),
        keys.retry_stream(*unit),
        keys.retry(*unit),
        keys.retry_items(*unit),
        keys.dlq(unit.topic, unit.partition),
        keys.scheduled(unit.topic, unit.partition),
        keys.scheduled_items(unit.topic, unit.partition),
        keys.fence(*unit),
        keys.attempts(*unit),
        keys.trim(unit.topic, unit.partition),
    )
    return ("EVAL", SCRIPT, len(names), *names, unit.group)


class Conservation:
    """Checks a fleet that works, again and again, against its ledger.

    The ledger has `sent` records whose payload begins with the message's number and whose partition
    `home` tells from that number, and runs whose text begins with it.
    """

    def __init__(
        self,
        link: Connection,
        keys: Keys,
        units: Iterable[Unit],
        ledger: Ledger,
        *,
        drops: bool = False,
        expiring: Collection[str] = (),
    ) -> None:
        """`expiring` are numbers; the caller may go on adding to them, before it sends."""
        self.link = link
        self.keys = keys
        self.units = list(units)
        self.checks = 0
        self.violations: list[str] = []
        self.last: dict[Unit, Whereabouts] = {}
        self.charges: dict[tuple[str, str], int] = {}  # group, number -> the most crashes seen
        self.unhandled: dict[Unit, set[str]] = {}  # in no place at the last look, and never handled
        self._drops = drops
        self._expiring = expiring
        self._partitions = len({unit.partition for unit in self.units})
        self._ledger = ledger
        self._read = 0
        self._open: dict[Unit, set[str]] = {unit: set() for unit in self.units}
        self._settled: dict[Unit, set[str]] = {unit: set() for unit in self.units}
        self._ended: dict[str, set[str]] = {unit.group: set() for unit in self.units}

    def check(self) -> None:
        """Look once and note what is wrong. Raises RedisRefused, RedisUnavailable."""
        # What was sent before the picture was taken must be in it; what is not in it any more
        # must have ended before, so the ledger is read again.
        self._read_ledger()
        seen = look(self.link, self.keys, self.units)
        self._read_ledger(new_too=False)
        for unit, now in seen.items():
            self._judge(unit, now)
        self.last = seen
        self.checks += 1

    def left(self) -> Counter[str]:
        """How many messages were in each place at the last check, dead ones aside."""
        found = (names for now in self.last.values() for names in now.places.values())
        return Counter(name for names in found for name in names if name != "dead")

    def dead(self) -> dict[str, set[str]]:
        """Group -> numbers of its dead letters at the last check."""
        found: dict[str, set[str]] = {unit.group: set() for unit in self.units}
        for unit, now in self.last.items():
            found[unit.group] |= {n for n, names in now.places.items() if "dead" in names}
        return found

    def _judge(self, unit: Unit, now: Whereabouts) -> None:
        places = now.places
        for number, crashes in now.charges.items():
            key = (unit.group, number)
            self.charges[key] = max(crashes, self.charges.get(key, 0))
        for number, names in places.items():
            if number == "?" and self._drops and now.ghosts == len(names):
                continue
            if len(names) > 1 or number == "?":
                self._blame(f"{unit}: {number} is in several places, or without a body: {names}")
        for number in self._settled[unit] & places.keys():
            self._blame(f"{unit}: {number} was settled and is {places[number]} again")
        gone = self._open[unit] - places.keys()
        unhandled = self.unhandled[unit] = gone - self._ended[unit.group]
        if self._drops:
            # A handler may still have one in hand that is lost, and set it aside for a retry.
            gone -= unhandled
            self._compare_with_counters(unit, now, unhandled)
        else:
            for number in unhandled - {*self._expiring}:
                self._blame(f"{unit}: {number} is nowhere, and no run of it has ended well")
        self._open[unit] -= gone
        self._settled[unit] |= gone
        before = self.last.get(unit)
        if before is not None and now.epoch < before.epoch:
            self._blame(f"{unit}: the epoch fell from {before.epoch} to {now.epoch}")

    def _compare_with_counters(self, unit: Unit, now: Whereabouts, unhandled: set[str]) -> None:
        uncounted = len(unhandled.difference(self._expiring)) - now.lost
        if uncounted > 0:
            self._blame(f"{unit}: {uncounted} are nowhere, not handled well, and not counted")
        if now.lost_unread > len(unhandled):
            self._blame(f"{unit}: {now.lost_unread} were lost unread, and {unhandled} are nowhere")

    def _blame(self, sentence: str) -> None:
        if sentence not in self.violations:
            self.violations.append(sentence)

    def _read_ledger(self, *, new_too: bool = True) -> None:
        """Take in what was written since; without `new_too`, only what has ended."""
        records = self._ledger.since(self._read)
        for record in records:
            if record.kind == "end":
                self._ended[record.group].add(number_of(record))
            elif record.kind == "sent" and new_too:
                number = number_of(record)
                for unit in self.units:
                    if unit.partition == home(number, self._partitions):
                        self._open[unit].add(number)
        if new_too:
            self._read += len(records)


def home(number: str, partitions: int) -> int:
    """The partition that the message of this number is sent to."""
    return int(number) % partitions


def number_of(record: Record) -> str:
    """The number of the message that a record is about."""
    return record.text.partition(" ")[0]
