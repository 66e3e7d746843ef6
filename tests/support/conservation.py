"""Conservation: at any time, each message is in exactly one place, acknowledged, or counted.

    sent = acknowledged + dead + pending + delayed + retry + unread + dropped and counted

`Conservation.check` reads the places of all messages of a group in a partition with one read-only
script (message_places.lua), and compares them with the ledger. A message that is in no place must
have been handled successfully, because no other message may be acknowledged. A settled message
never comes back, and the epoch of the fence never decreases.

If a limit may drop messages (`drops`), some messages are in no place without having been handled.
Their number must not exceed the losses that the product has counted, which the same script reads.
It must be at least the number lost unread, because no process can have handled those. Messages that
may expire (`expiring`) may be acknowledged without being handled. In that case, the caller compares
the product's count with `unhandled`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from streamqd.errors import RedisResponseError
from streamqd.model import Assignment
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from tests.support.ledger import Ledger, Record

SCRIPT = Path(__file__).with_name("message_places.lua").read_text()
PLACES = ("unread", "pending", "delayed", "retry unread", "retry pending", "dead", "scheduled")


class MessagePlaces(NamedTuple):
    """The places of an assignment's messages, by message number. Several places are an error.

    `lost_unread` and `lost_pending` are the numbers of messages lost to a limit, as counted by the
    product.
    """

    epoch: int
    places: dict[str, list[str]]
    charges: dict[str, int]  # message number -> crashes
    lost_unread: int
    lost_pending: int

    @property
    def missing_entries(self) -> int:
        """The number of pending entries without a body.

        A limit removed the bodies, and these losses are not counted yet.
        """
        return self.places.get("?", []).count("pending")

    @property
    def lost(self) -> int:
        """The number of messages that were lost to a limit."""
        return self.lost_unread + self.lost_pending + self.missing_entries

    @classmethod
    def parse(cls, reply: list[Any]) -> MessagePlaces:
        epoch, lost, flat, *lists = reply
        charges: dict[str, int] = {}
        for number, crashes in zip(flat[::2], flat[1::2], strict=True):
            charges[number.decode()] = max(crashes, charges.get(number.decode(), 0))
        places: dict[str, list[str]] = {}
        for name, numbers in zip(PLACES, lists, strict=True):
            for number in numbers:
                places.setdefault(number.decode(), []).append(name)
        return cls(int(epoch), places, charges, *(int(each or 0) for each in lost))


def read_places(
    link: Connection, keys: Keys, assignments: Iterable[Assignment]
) -> dict[Assignment, MessagePlaces]:
    """Read the places of all messages of each assignment.

    Raises RedisResponseError, RedisUnavailableError.
    """
    assignments = list(assignments)
    found = {}
    for assignment, reply in zip(
        assignments, link.pipeline([_call(keys, u) for u in assignments]), strict=True
    ):
        if isinstance(reply, RedisResponseError):
            raise reply
        found[assignment] = MessagePlaces.parse(reply)
    return found


def _call(keys: Keys, assignment: Assignment) -> tuple[str | int, ...]:
    names = (
        keys.stream(assignment.topic, assignment.partition),
        keys.retry_stream(*assignment),
        keys.retry(*assignment),
        keys.retry_items(*assignment),
        keys.dlq(assignment.topic, assignment.partition),
        keys.delayed_sends(assignment.topic, assignment.partition),
        keys.delayed_send_items(assignment.topic, assignment.partition),
        keys.fence(*assignment),
        keys.attempts(*assignment),
        keys.trim(assignment.topic, assignment.partition),
    )
    return ("EVAL", SCRIPT, len(names), *names, assignment.group)


class Conservation:
    """Compares a working fleet with its ledger, as often as needed.

    The text of a `sent` record and of a run starts with the number of the message.
    `partition_for_number` derives the partition from this number.
    """

    def __init__(
        self,
        link: Connection,
        keys: Keys,
        assignments: Iterable[Assignment],
        ledger: Ledger,
        *,
        drops: bool = False,
        expiring: Collection[str] = (),
    ) -> None:
        """Prepare the checks of these assignments.

        `expiring` contains the numbers of messages that may expire. The caller may add more
        numbers, but must do so before sending the messages.
        """
        self.link = link
        self.keys = keys
        self.assignments = list(assignments)
        self.checks = 0
        self.violations: list[str] = []
        self.last: dict[Assignment, MessagePlaces] = {}
        self.charges: dict[tuple[str, str], int] = {}  # group, number -> most crashes seen
        self.unhandled: dict[
            Assignment, set[str]
        ] = {}  # numbers that were in no place at the last check and were not handled
        self._drops = drops
        self._expiring = expiring
        self._partitions = len({assignment.partition for assignment in self.assignments})
        self._ledger = ledger
        self._read = 0
        self._open: dict[Assignment, set[str]] = {
            assignment: set() for assignment in self.assignments
        }
        self._settled: dict[Assignment, set[str]] = {
            assignment: set() for assignment in self.assignments
        }
        self._ended: dict[str, set[str]] = {
            assignment.group: set() for assignment in self.assignments
        }

    def check(self) -> None:
        """Check once, and record all violations.

        Raises RedisResponseError, RedisUnavailableError.
        """
        # Messages that were sent before the places are read must be in one of them. Messages that
        # are in none must have finished earlier, so the ledger is read again afterwards.
        self._read_ledger()
        seen = read_places(self.link, self.keys, self.assignments)
        self._read_ledger(new_too=False)
        for assignment, now in seen.items():
            self._judge(assignment, now)
        self.last = seen
        self.checks += 1

    def count_unfinished(self) -> Counter[str]:
        """Return the number of messages in each place at the last check, without dead letters."""
        found = (names for now in self.last.values() for names in now.places.values())
        return Counter(name for names in found for name in names if name != "dead")

    def dead_letter_numbers(self) -> dict[str, set[str]]:
        """Return the message numbers of each group's dead letters at the last check."""
        found: dict[str, set[str]] = {assignment.group: set() for assignment in self.assignments}
        for assignment, now in self.last.items():
            found[assignment.group] |= {n for n, names in now.places.items() if "dead" in names}
        return found

    def _judge(self, assignment: Assignment, now: MessagePlaces) -> None:
        places = now.places
        for number, crashes in now.charges.items():
            key = (assignment.group, number)
            self.charges[key] = max(crashes, self.charges.get(key, 0))
        for number, names in places.items():
            if number == "?" and self._drops and now.missing_entries == len(names):
                continue
            if len(names) > 1 or number == "?":
                self._blame(
                    f"{assignment}: {number} is in several places, or without a body: {names}"
                )
        for number in self._settled[assignment] & places.keys():
            self._blame(f"{assignment}: {number} was settled and is {places[number]} again")
        gone = self._open[assignment] - places.keys()
        unhandled = self.unhandled[assignment] = gone - self._ended[assignment.group]
        if self._drops:
            # A handler may still hold a lost message and set it aside for a retry.
            gone -= unhandled
            self._compare_with_counters(assignment, now, unhandled)
        else:
            for number in unhandled - {*self._expiring}:
                self._blame(f"{assignment}: {number} is nowhere, and no run of it has ended well")
        self._open[assignment] -= gone
        self._settled[assignment] |= gone
        before = self.last.get(assignment)
        if before is not None and now.epoch < before.epoch:
            self._blame(f"{assignment}: the epoch fell from {before.epoch} to {now.epoch}")

    def _compare_with_counters(
        self, assignment: Assignment, now: MessagePlaces, unhandled: set[str]
    ) -> None:
        uncounted = len(unhandled.difference(self._expiring)) - now.lost
        if uncounted > 0:
            self._blame(f"{assignment}: {uncounted} are nowhere, not handled well, and not counted")
        if now.lost_unread > len(unhandled):
            self._blame(
                f"{assignment}: {now.lost_unread} were lost unread, and {unhandled} are nowhere"
            )

    def _blame(self, sentence: str) -> None:
        if sentence not in self.violations:
            self.violations.append(sentence)

    def _read_ledger(self, *, new_too: bool = True) -> None:
        """Read new records of the ledger. If `new_too` is False, read only finished runs."""
        records = self._ledger.since(self._read)
        for record in records:
            if record.kind == "end":
                self._ended[record.group].add(message_number(record))
            elif record.kind == "sent" and new_too:
                number = message_number(record)
                for assignment in self.assignments:
                    if assignment.partition == partition_for_number(number, self._partitions):
                        self._open[assignment].add(number)
        if new_too:
            self._read += len(records)


def partition_for_number(number: str, partitions: int) -> int:
    """Return the partition that a message number belongs to."""
    return int(number) % partitions


def message_number(record: Record) -> str:
    """Return the number of the message that a record is about."""
    return record.text.partition(" ")[0]
