"""The stack of a worker in Redis is bounded when it is written, and checked when it is read."""

from __future__ import annotations

import json

import pytest

from streamqd.errors import InvalidValueError
from streamqd.model import Assignment
from streamqd.store import stacks
from streamqd.store.keys import Keys
from streamqd.store.stacks import BYTES_MAX, KEPT_SECONDS, PublishedStack

ASSIGNMENT = Assignment("orders", 0, "bill")
FOUND = PublishedStack(5, 7, "one", 9, 4711, "Stack (most recent call first):\n  File x")


def publish_stack(found: PublishedStack) -> bytes:
    command = stacks.publish(Keys(), ASSIGNMENT, found)
    assert command[:2] == ("SET", "streaming:mq:stack:{orders:p:0}:bill")
    assert command[3:] == ("PX", KEPT_SECONDS * 1000)
    return command[2].encode()


def test_published_stack_round_trips() -> None:
    assert stacks.parse(publish_stack(FOUND), "k") == FOUND
    assert stacks.parse(None, "k") is None


def test_long_stack_is_truncated_at_a_line_end() -> None:
    line = "  File ü"
    long = FOUND._replace(stack="\n".join([line] * 10_000))
    found = stacks.parse(publish_stack(long), "k")
    assert found is not None
    assert len(found.stack.encode()) <= BYTES_MAX
    assert set(found.stack.split("\n")) == {line}
    assert found.stack.count("\n") + 1 + found.lines_left_out == 10_000
    assert BYTES_MAX - len(found.stack.encode()) <= len(line.encode()) + 1


def test_stack_of_one_oversized_line_is_empty() -> None:
    found = stacks.parse(publish_stack(FOUND._replace(stack="x" * (BYTES_MAX + 1))), "k")
    assert found is not None
    assert (found.stack, found.lines_left_out) == ("", 1)


@pytest.mark.parametrize(
    "changed",
    [
        {"stack": None},
        {"stack": ["a"]},
        {"instance": 1},
        {"problem": {}},
        {"epoch": "9"},
        {"epoch": True},
        {"epoch": -1},
        {"pid": 1.5},
        {"at_unix_ms": 1 << 60},
        {"requested_unix_ms": None},
    ],
)
def test_stack_with_an_invalid_field_is_refused(changed: dict[str, object]) -> None:
    body = json.dumps(FOUND._asdict() | changed).encode()
    with pytest.raises(InvalidValueError):
        stacks.parse(body, "k")


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b"\xff", b"{" * 9_999, b" " * (2 << 20)])
def test_stack_that_is_not_a_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidValueError):
        stacks.parse(raw, "k")


def test_oversized_stack_is_truncated_on_read() -> None:
    body = json.dumps(FOUND._asdict() | {"stack": "line\n" * 100_000}).encode()
    found = stacks.parse(body, "k")
    assert found is not None
    assert len(found.stack) <= BYTES_MAX
    assert found.lines_left_out > 90_000
