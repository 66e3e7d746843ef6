"""The options of producers. They are checked in the same way for all kinds of producers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from types import NoneType
from typing import Any, NamedTuple, TypedDict

from streamqd.config.values import Duration, Size, parse_duration, parse_size
from streamqd.producer.encoding import CENTURY
from streamqd.producer.routing import Partitioner


class ProducerOptions(TypedDict, total=False):
    """The options of all producers. `Producer` documents them."""

    create: bool
    timeout: Duration
    dedup_window: Duration
    partitioner: Partitioner | Mapping[str, Partitioner]
    max_backlog: int | None
    backlog_wait: Duration
    traces: bool | None


class BufferOptions(TypedDict, total=False):
    """The options of a buffered producer. `BufferedProducer` documents them."""

    linger: Duration
    max_batch: int
    max_messages: int
    max_bytes: Size
    block: Duration


class _Rule(NamedTuple):
    """The rule for an option: its types, its parser, its bounds, and their description."""

    types: tuple[type, ...]
    read: Callable[[Any], float]
    minimum: float
    maximum: float
    words: str


def _duration(least: float = 0.0, most: float = CENTURY) -> _Rule:
    words = f"from {least:g} to {most:,.0f} seconds, as a number, a timedelta or a string like 5ms"
    return _Rule((int, float, str, timedelta), parse_duration, least, most, words)


def _count(words: str, *others: type) -> _Rule:
    return _Rule((int, *others), int, 1, 10**12, words)


_RULES = {
    "create": _Rule((bool,), bool, False, True, "a Boolean"),
    "traces": _Rule((bool, NoneType), bool, False, True, "True, False or None"),
    "timeout": _duration(0.001, 86_400.0),  # a socket accepts at most a few weeks
    "dedup_window": _duration(0.001),
    "backlog_wait": _duration(),
    "max_backlog": _count("an integer, 1 or more, or None", NoneType),
    "linger": _duration(),
    "block": _duration(),
    "max_batch": _count("an integer, 1 or more"),
    "max_messages": _count("an integer, 1 or more"),
    "max_bytes": _Rule(
        (int, str), parse_size, 1, 1 << 50, "1 byte or more, as a number or a string like 64MiB"
    ),
}


def parse_options(**options: Any) -> dict[str, Any]:
    """Return the options, with durations in seconds and sizes in bytes.

    Raises TypeError if a value has the wrong type, and ValueError if it is out of bounds or cannot
    be parsed. The text of an error is a sentence that contains the name of the option.
    """
    return {name: _parse_option(name, value) for name, value in options.items()}


def _parse_option(name: str, value: Any) -> Any:
    rule = _RULES[name]
    sentence = f"{name} must be {rule.words}, not {value!r}"
    # In Python, True is also an int, so Booleans are rejected explicitly.
    if not isinstance(value, rule.types) or (isinstance(value, bool) and bool not in rule.types):
        raise TypeError(sentence)
    if value is None:
        return None
    try:
        found = rule.read(value)
    except ValueError:
        raise ValueError(sentence) from None
    if not rule.minimum <= found <= rule.maximum:
        raise ValueError(sentence)
    return found
