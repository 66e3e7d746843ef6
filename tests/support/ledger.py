"""The ledger: what really happened to each message, written down outside of streamqd.

One file. The producer writes `sent` once the server has confirmed a message; a handler writes
`start` when it is called and `end` or `raise` when it is about to return, and what it wrote is on
the disk before it does. Each record is one write to the end of the file, so none is lost with the
process that wrote it. Only SIGKILL can tear one, where it lies on two pages; each begins on a line
of its own, so that does not spoil the record of another process.

"Nothing lost" is judged by `audit`, never by what streamqd says about itself.
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

VARIABLE = "LEDGER"  # tells handlers, in the environment, where the file is


class Handled(Protocol):
    """What the ledger writes down of a message."""

    @property
    def uid(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def attempt(self) -> int: ...


class Record(NamedTuple):
    """One line. `at` is the monotonic clock, which all processes of a host share, in seconds."""

    kind: str  # sent | start | end | raise | note, or what `tell` was given
    uid: str
    group: str  # '' for what is no run
    attempt: int
    pid: int
    at: float
    text: str  # the payload of `sent`, the code version of a run, whatever a note says


@dataclass
class Audit:
    """What is wrong with the runs of one group; empty when every message ran exactly once."""

    lost: list[str] = field(default_factory=list)  # sent, and no run of it ever ended
    repeated: dict[str, int] = field(default_factory=dict)  # uid -> runs that began, when > 1
    unexpected: list[str] = field(default_factory=list)  # run, but never sent


class Ledger:
    """The file, for writing (producer and handlers) and for reading (the test)."""

    def __init__(self, path: Path, version: str = "", *, durable: bool = True) -> None:
        """`durable`: the end of a run is on the disk before the handler returns.

        What dies with a process is safe without; what dies with its machine is not.
        """
        self.path = path
        self.version = version
        self._durable = durable
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        self._read_to = 0
        self._records: list[Record] = []

    @classmethod
    def here(cls, version: str = "", *, durable: bool = True) -> Self:
        """The ledger that the environment names. `version` is written beside each run."""
        return cls(Path(os.environ[VARIABLE]), version, durable=durable)

    def close(self) -> None:
        """Give the descriptor up."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    # --- writing ---

    def sent(self, uid: str, payload: str) -> None:
        """Note a message that the server has confirmed."""
        self.tell("sent", payload, uid)

    def tell(self, kind: str, text: str, uid: str = "") -> None:
        """Write down anything that is no run."""
        self._write(Record(kind, uid, "", 0, os.getpid(), time.monotonic(), text))

    @contextmanager
    def run(self, message: Handled, text: str | None = None) -> Iterator[None]:
        """Note a run: `start` now, `end` or `raise` when the body is over.

        `text` is written beside each; without one, the code version.
        """
        self._note_run("start", message, text)
        try:
            yield
        except BaseException:
            self._note_end("raise", message, text)
            raise
        self._note_end("end", message, text)

    def note(self, message: Handled, text: str) -> None:
        """Write down anything else that the test wants to know of a run."""
        self._note_run("note", message, text)

    def _note_end(self, kind: str, message: Handled, text: str | None) -> None:
        self._note_run(kind, message, text)
        if self._durable:
            os.fsync(self._descriptor)

    def _note_run(self, kind: str, message: Handled, text: str | None = None) -> None:
        text = self.version if text is None else text
        run = (message.uid, message.group, message.attempt, os.getpid(), time.monotonic())
        self._write(Record(kind, *run, text))

    def _write(self, record: Record) -> None:
        line = b"\n" + json.dumps(record).encode() + b"\n"
        assert os.write(self._descriptor, line) == len(line)

    # --- reading ---

    def records(self, *kinds: str) -> list[Record]:
        """All records so far, or those of some kinds, in the order of writing."""
        return [each for each in self.since(0) if not kinds or each.kind in kinds]

    def since(self, count: int) -> list[Record]:
        """All records so far but the first `count`."""
        with self.path.open("rb") as file:
            file.seek(self._read_to)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read_to += len(whole)
        lines = [line for line in whole.splitlines() if line.endswith(b"]")]  # not torn
        self._records += [Record(*json.loads(line)) for line in lines]
        return self._records[count:]

    def of(self, uid: str, *kinds: str) -> list[Record]:
        """The records of one message."""
        return [each for each in self.records(*kinds) if each.uid == uid]

    def count(self, kind: str) -> int:
        """How many records of a kind there are."""
        return len(self.records(kind))

    def ended(self, group: str) -> set[str]:
        """The messages of which a run has ended well."""
        return {each.uid for each in self.records("end") if each.group == group}

    def audit(self, group: str) -> Audit:
        """Compare what was sent with what ran."""
        sent = {each.uid for each in self.records("sent")}
        starts = Counter(each.uid for each in self.records("start") if each.group == group)
        return Audit(
            sorted(sent - self.ended(group)),
            {uid: count for uid, count in sorted(starts.items()) if count > 1},
            sorted(starts.keys() - sent),
        )
