"""The requested stack of a worker: a STRING with a TTL for each assignment.

The owner's supervisor writes the stack after a directive `stack:TOPIC/PARTITION/GROUP`.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from streamqd.errors import InvalidValueError
from streamqd.model import Assignment
from streamqd.store import untrusted
from streamqd.store.keys import Keys

KEPT_SECONDS = 300  # lifetime of a published stack
BYTES_MAX = 32 * 1024  # longest text of a published stack, in bytes
_TEXTS = ("instance", "stack", "problem")
_INTEGERS = ("requested_unix_ms", "at_unix_ms", "epoch", "pid", "lines_left_out")


class PublishedStack(NamedTuple):
    """The answer to a request: a stack, or the reason why there is none.

    `requested_unix_ms` is the time of the directive, and `at_unix_ms` the time of the stack (Redis
    time). `pid` is 0 without a process. `lines_left_out` is the number of lines that were cut from
    the end of the stack.
    """

    requested_unix_ms: int
    at_unix_ms: int
    instance: str
    epoch: int
    pid: int = 0
    stack: str = ""
    lines_left_out: int = 0
    problem: str = ""

    def shorten(self) -> PublishedStack:
        """Return a copy with at most BYTES_MAX bytes of the stack, in whole lines."""
        kept, left_out = _shorten(self.stack)
        return self._replace(stack=kept, lines_left_out=self.lines_left_out + left_out)


def publish(keys: Keys, assignment: Assignment, found: PublishedStack) -> tuple[Any, ...]:
    """Build the command that publishes a stack for KEPT_SECONDS and replaces an earlier stack."""
    body = json.dumps(found.shorten()._asdict(), separators=(",", ":"))
    return ("SET", keys.stack(*assignment), body, "PX", KEPT_SECONDS * 1000)


def parse(raw: bytes | None, key: str) -> PublishedStack | None:
    """Parse a published stack, None for a missing key. Raises InvalidValueError."""
    if raw is None:
        return None
    found = untrusted.json_object(raw, key)
    for name in _TEXTS:
        if not isinstance(found.get(name), str):
            raise InvalidValueError(key, name, untrusted.format_value(raw), "a string")
    for name in _INTEGERS:
        value = found.get(name)
        if type(value) is not int or not 0 <= value <= untrusted.INTEGER_MAX:
            raise InvalidValueError(key, name, untrusted.format_value(raw), "an integer from 0")
    return PublishedStack(**{name: found[name] for name in PublishedStack._fields}).shorten()


def _shorten(text: str) -> tuple[str, int]:
    """Return the first lines of a text, and the number of lines that are left out."""
    lines = text.splitlines()
    kept, size = 0, 0
    for line in lines:
        size += len(line.encode("utf-8", "backslashreplace")) + 1
        if size > BYTES_MAX:
            break
        kept += 1
    return "\n".join(lines[:kept]), len(lines) - kept
