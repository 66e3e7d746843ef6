"""The options of producers, and their check: one for every kind of producer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, TypedDict

from streamqd.config.values import parse_duration, parse_size
from streamqd.producer.encoding import CENTURY
from streamqd.producer.routing import Partitioner

Duration = float | str | timedelta  # seconds, or a text such as "5ms"
Size = int | str  # bytes, or a text such as "64MiB"


class ProducerOptions(TypedDict, total=False):
    """The options of every kind of producer, as `Producer` explains them."""

    create: bool
    timeout: Duration
    dedup_window: Duration
    partitioner: Partitioner | Mapping[str, Partitioner]
    max_backlog: int | None
    backlog_wait: Duration


class BufferOptions(TypedDict, total=False):
    """The options of a buffered producer, as `BufferedProducer` explains them."""

    linger: Duration
    max_batch: int
    max_messages: int
    max_bytes: Size
    block: Duration


class _Rule(NamedTuple):
    """An option: its types, how it is read, and its bounds."""

    types: tuple[type, ...]
    read: Callable[[Any], float]
    least: float
    most: float
    hint: str


def _duration(least: float = 0.0, most: float = CENTURY) -> _Rule:
    within = f"from {least:g} to {most:,.0f} seconds, as a number, a timedelta or a text like 5ms"
    return _Rule((int, float, str, timedelta), parse_duration, least, most, within)


_COUNT = _Rule((int,), int, 1, 10**12, "a whole number, 1 or more")
_RULES = {
    "timeout": _duration(0.001, 86_400.0),  # a socket takes no more than a few weeks
    "dedup_window": _duration(0.001),
    "backlog_wait": _duration(),
    "max_backlog": _COUNT,
    "linger": _duration(),
    "block": _duration(),
    "max_batch": _COUNT,
    "max_messages": _COUNT,
    "max_bytes": _Rule(
        (int, str), parse_size, 1, 1 << 50, "1 byte or more, as a number or a text like 64MiB"
    ),
}
_MAY_BE_NONE = frozenset({"max_backlog"})


def checked(**options: Any) -> dict[str, Any]:
    """Return options with durations in seconds and sizes in bytes.

    Raises TypeError for a value of the wrong type and ValueError for one that is out of bounds or
    cannot be read, each with one sentence that names the option.
    """
    return {name: _checked(name, value) for name, value in options.items()}


def _checked(name: str, value: Any) -> Any:
    if name == "create":
        if not isinstance(value, bool):
            raise TypeError(f"create is True or False, not {value!r}")
        return value
    if value is None and name in _MAY_BE_NONE:
        return None
    rule = _RULES[name]
    sentence = f"{name} is {rule.hint}{', or None' if name in _MAY_BE_NONE else ''}, not {value!r}"
    if isinstance(value, bool) or not isinstance(value, rule.types):
        raise TypeError(sentence)
    try:
        found = rule.read(value)
    except ValueError:
        raise ValueError(sentence) from None
    if not rule.least <= found <= rule.most:
        raise ValueError(sentence)
    return found
