"""Publish and read the stack of a worker that an operator has requested.

After a directive `stack:TOPIC/PARTITION/GROUP`, the owner's supervisor writes the stack to a key of
the assignment, which expires after KEPT_SECONDS.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from streamqd.errors import InvalidValueError
from streamqd.model import Assignment
from streamqd.store import untrusted
from streamqd.store.keys import Keys

KEPT_SECONDS = 300  # how long a published stack is kept
BYTES_MAX = 32 * 1024  # maximum size of a published stack in bytes
_TEXTS = ("instance", "stack", "problem")
_INTEGERS = ("requested_unix_ms", "at_unix_ms", "epoch", "pid", "lines_left_out")


class PublishedStack(NamedTuple):
    """The answer to a request for a stack.

    If there is no stack, `stack` is '' and `problem` is the reason. `requested_unix_ms` is the time
    of the directive, and `at_unix_ms` the time of the stack, both by the clock of Redis. `pid` is 0
    if there is no process. `lines_left_out` is the number of lines that were cut from the end of
    the stack.
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
        """Return a copy whose stack is cut after a whole line, so that it fits in BYTES_MAX."""
        kept, left_out = _shorten(self.stack)
        return self._replace(stack=kept, lines_left_out=self.lines_left_out + left_out)


def publish(keys: Keys, assignment: Assignment, found: PublishedStack) -> tuple[Any, ...]:
    """Return the command that publishes a stack for KEPT_SECONDS, replacing an earlier one."""
    body = json.dumps(found.shorten()._asdict(), separators=(",", ":"))
    return ("SET", keys.stack(*assignment), body, "PX", KEPT_SECONDS * 1000)


def parse(raw: bytes | None, key: str) -> PublishedStack | None:
    """Parse a published stack. Return None if `raw` is None, because no stack was published.

    Raises InvalidValueError if a field is missing or invalid.
    """
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
    """Return the first lines of a text that fit in BYTES_MAX, and the number of other lines."""
    lines = text.splitlines()
    kept, size = 0, 0
    for line in lines:
        size += len(line.encode("utf-8", "backslashreplace")) + 1
        if size > BYTES_MAX:
            break
        kept += 1
    return "\n".join(lines[:kept]), len(lines) - kept
