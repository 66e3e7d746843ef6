"""The ledger: the real fate of each message, recorded independently of streamqd.

The ledger is one file. The producer writes `sent` after the server has confirmed a message. A
handler writes `start` when it is called, and `end` or `raise` before it returns, synced to disk.
Each record is one appending write, so no record is lost together with its process. Only SIGKILL can
tear a record, if the record spans two pages. Each record starts on a new line, so that a torn
record does not damage others.

`audit` alone decides whether anything is lost, and never uses the figures of streamqd itself.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, Self

VARIABLE = "LEDGER"  # the environment variable that gives handlers the path


class LedgerMessage(Protocol):
    """The facts about a message that the ledger records."""

    @property
    def uid(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def attempt(self) -> int: ...


class Record(NamedTuple):
    """A line of the ledger.

    `at` is in seconds of the monotonic clock, which all processes of a host share.
    """

    kind: str  # sent | start | end | raise | note, or the argument of `record_event`
    uid: str
    group: str  # '' if the record is not about a run
    attempt: int
    pid: int
    at: float
    text: str  # the payload of `sent`, the code version of a run, or the text of a note


@dataclass
class Audit:
    """The errors in the runs of one group. All are empty if every message ran exactly once."""

    lost: list[str] = field(default_factory=list)  # sent, but no run of them finished
    repeated: dict[str, int] = field(default_factory=dict)  # uid -> number of started runs, if > 1
    unexpected: list[str] = field(default_factory=list)  # ran, but were never sent


class Ledger:
    """The file, which the producer and the handlers write and the test reads."""

    def __init__(self, path: Path, version: str = "", *, durable: bool = True) -> None:
        """Open the file.

        If `durable` is True, the end of a run is synced to disk before the handler returns.
        Otherwise, records survive the death of a process, but not that of the machine.
        """
        self.path = path
        self.version = version
        self._durable = durable
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        self._read_to = 0
        self._records: list[Record] = []

    @classmethod
    def from_environment(cls, version: str = "", *, durable: bool = True) -> Self:
        """Open the ledger that the environment names. `version` is recorded with each run."""
        return cls(Path(os.environ[VARIABLE]), version, durable=durable)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    # --- writing ---

    def record_sent(self, uid: str, payload: str) -> None:
        """Record a message that the server has confirmed."""
        self.record_event("sent", payload, uid)

    def record_event(self, kind: str, text: str, uid: str = "") -> None:
        """Record an event that is not a run."""
        self._write(Record(kind, uid, "", 0, os.getpid(), time.monotonic(), text))

    @contextmanager
    def run(self, message: LedgerMessage, text: str | None = None) -> Iterator[None]:
        """Record a run: `start` now, and `end` or `raise` after the block.

        `text` is recorded with both. The default is the version of the code.
        """
        self._note_run("start", message, text)
        try:
            yield
        except BaseException:
            self._note_end("raise", message, text)
            raise
        self._note_end("end", message, text)

    def note(self, message: LedgerMessage, text: str) -> None:
        """Record other facts about a run, for use by the test."""
        self._note_run("note", message, text)

    def _note_end(self, kind: str, message: LedgerMessage, text: str | None) -> None:
        self._note_run(kind, message, text)
        if self._durable:
            os.fsync(self._descriptor)

    def _note_run(self, kind: str, message: LedgerMessage, text: str | None = None) -> None:
        text = self.version if text is None else text
        run = (message.uid, message.group, message.attempt, os.getpid(), time.monotonic())
        self._write(Record(kind, *run, text))

    def _write(self, record: Record) -> None:
        line = b"\n" + json.dumps(record).encode() + b"\n"
        assert os.write(self._descriptor, line) == len(line)

    # --- reading ---

    def records(self, *kinds: str) -> list[Record]:
        """Return all records so far, or those of the given kinds, in the order of writing."""
        return [each for each in self.since(0) if not kinds or each.kind in kinds]

    def since(self, count: int) -> list[Record]:
        """Return all records so far, except the first `count`."""
        with self.path.open("rb") as file:
            file.seek(self._read_to)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read_to += len(whole)
        lines = [line for line in whole.splitlines() if line.endswith(b"]")]  # skips torn lines
        self._records += [Record(*json.loads(line)) for line in lines]
        return self._records[count:]

    def records_for(self, uid: str, *kinds: str) -> list[Record]:
        """Return the records of one message."""
        return [each for each in self.records(*kinds) if each.uid == uid]

    def count(self, kind: str) -> int:
        """Return the number of records of a kind."""
        return len(self.records(kind))

    def finished_uids(self, group: str) -> set[str]:
        """Return the uids of the messages that a group has run successfully."""
        return {each.uid for each in self.records("end") if each.group == group}

    def audit(self, group: str) -> Audit:
        """Compare the sent messages with the runs of a group."""
        sent = {each.uid for each in self.records("sent")}
        starts = Counter(each.uid for each in self.records("start") if each.group == group)
        return Audit(
            sorted(sent - self.finished_uids(group)),
            {uid: count for uid, count in sorted(starts.items()) if count > 1},
            sorted(starts.keys() - sent),
        )
