"""Delayed messages: a due time in a ZSET and the message in a HASH, which belong together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamqd.admin.diagnosis.facts import Delays
from streamqd.admin.diagnosis.reading import TolerantReader
from streamqd.admin.unreadable import BadValues
from streamqd.store import untrusted

COMPARED_MAX = 1_000  # members that are compared one by one
Pair = tuple[str, str]  # the keys of due times and of messages


def gather(reader: TolerantReader, pairs: Sequence[Pair]) -> list[Delays]:
    """Look at pairs of keys.

    The commands of one look are not one instant. What is odd in two looks, by the same names, is
    odd.
    """
    looks = [_look(reader, pair) for pair in _sized(reader, pairs)]
    odd = [at for at, look in enumerate(looks) if look.lost or look.stuck or look.more]
    for at, again in zip(odd, _sized(reader, [pairs[at] for at in odd]), strict=True):
        looks[at] = _both(looks[at], _look(reader, again))
    return looks


def _sized(reader: TolerantReader, pairs: Sequence[Pair]) -> list[tuple[Pair, list[Any]]]:
    """The pairs with the sizes of both keys, and the first due time."""
    asked: list[tuple[Any, ...]] = []
    for due, items in pairs:
        asked += [("ZCARD", due), ("HLEN", items), ("ZRANGE", due, 0, 0, "WITHSCORES")]
    replies = reader.ask(asked)
    return [(pair, replies[3 * at : 3 * at + 3]) for at, pair in enumerate(pairs)]


def _look(reader: TolerantReader, sized: tuple[Pair, list[Any]]) -> Delays:
    (due, items), (members, messages, first) = sized
    if members is None or messages is None or not (members or messages):
        return Delays()
    told = BadValues().read(untrusted.number, first[1], due) if first else None
    next_due = None if told is None else int(told)
    if max(members, messages) > COMPARED_MAX:
        return Delays(members, next_due, more=members - messages)
    named, stored = reader.ask([("ZRANGE", due, 0, COMPARED_MAX), ("HKEYS", items)])
    times, kept = _texts(named), _texts(stored)
    return Delays(members, next_due, sorted(times - kept), sorted(kept - times))


def _both(first: Delays, second: Delays) -> Delays:
    return Delays(
        second.count,
        second.next_due_unix_ms,
        sorted(set(first.lost) & set(second.lost)),
        sorted(set(first.stuck) & set(second.stuck)),
        second.more if first.more == second.more else 0,
    )


def _texts(raw: Sequence[bytes] | None) -> set[str]:
    return {each.decode("utf-8", "replace") for each in raw or ()}
