"""Compute the due times of schedules, without I/O.

A tick is a time that a schedule defines. It is due later than that by an offset, which is less than
the jitter of the schedule. The offset is the same for all ticks of a schedule. All times are in
unix ms, by the server's clock.
"""

from __future__ import annotations

import functools
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from cronsim import CronSim

from streamqd.config.schedules import ALL, LAST_UNIX_MS, SKIP, Schedule, load_timezone

CATCH_UP_MAX = 100  # maximum number of missed ticks that `misfire = "all"` sends
COUNTED_MAX = 1_000  # number up to which the skipped ticks of a cron expression are counted
SLACK_MS = 5_000  # a tick counts as on time at least this long, unless misfire_grace is shorter


@dataclass(frozen=True, slots=True)
class TickStep:
    """One step of a schedule, which advances it to the tick `following`.

    `tick` is the tick for which the step sends a message, or None if it sends none. `following` is
    None if there are no more ticks. `skipped` is the number of ticks in the step for which no
    message is sent.
    """

    tick: int | None
    following: int | None
    skipped: int = 0


def offset_ms(schedule: Schedule) -> int:
    """Return the number of milliseconds from a tick to its due time."""
    jitter_ms = round(schedule.jitter * 1000)
    return zlib.crc32(schedule.name.encode()) % jitter_ms if jitter_ms else 0


def next_tick(schedule: Schedule, after_unix_ms: int) -> int | None:
    """Return the first tick after a time, or None if there is none.

    Except for `at`, ticks are limited to the years 1970 to 9000.
    """
    if schedule.at is not None:
        at = schedule.at_unix_ms
        return at if at is not None and at > after_unix_ms else None
    if after_unix_ms >= LAST_UNIX_MS:
        return None
    after_unix_ms = max(after_unix_ms, -1)
    if schedule.every is not None:
        period = round(schedule.every * 1000)
        return (after_unix_ms // period + 1) * period
    return _next_by_cron(schedule.cron or "", schedule.timezone or "UTC", after_unix_ms)


@functools.lru_cache(maxsize=8_192)
def _next_by_cron(cron: str, zone: str, after_unix_ms: int) -> int | None:
    """Return the next tick of a cron expression.

    The result is cached, because computing it takes half a millisecond, and schedules often have
    the same expression.
    """
    return next(_cron_ticks(cron, zone, after_unix_ms), None)


def _cron_ticks(cron: str, zone: str, after_unix_ms: int) -> Iterator[int]:
    """Yield the ticks of a cron expression after a time.

    When a local time is skipped or repeated, cronsim yields the same time again, or a time before
    the start. Such times are left out, so that ticks only increase.
    """
    begin = datetime.fromtimestamp(after_unix_ms // 1000, load_timezone(zone))
    last = after_unix_ms
    for found in CronSim(cron, begin):
        tick = round(found.timestamp() * 1000)
        if tick > last:
            last = tick
            yield tick


def newest_ticks(schedule: Schedule, after: int, until: int, limit: int) -> list[int]:
    """Return up to `limit` ticks that are later than `after` and not later than `until`.

    If there are more, these are the latest ones. They are in ascending order.
    """
    span = 3_600_000
    while True:
        start = max(after, until - span)
        found = deque(_ticks_between(schedule, start, until), maxlen=limit)
        if start == after or len(found) == limit:
            return list(found)
        span *= 8


def count_ticks(schedule: Schedule, after: int, until: int) -> int:
    """Return the number of ticks that are later than `after` and not later than `until`.

    For a cron expression, the result is at most COUNTED_MAX.
    """
    if schedule.every is not None:
        period = round(schedule.every * 1000)
        return max(0, until // period - after // period)
    number = 0
    for _ in _ticks_between(schedule, after, until):
        number += 1
        if number == COUNTED_MAX:
            break
    return number


def _ticks_between(schedule: Schedule, after: int, until: int) -> Iterator[int]:
    if schedule.every is not None:
        period = round(schedule.every * 1000)
        yield from range((after // period + 1) * period, until + 1, period)
    elif schedule.at is not None:
        at = next_tick(schedule, after)
        if at is not None and at <= until:
            yield at
    else:
        first = next_tick(schedule, after)
        if first is None or first > until:  # this result is cached, so it often saves a computation
            return
        for tick in _cron_ticks(schedule.cron or "", schedule.timezone or "UTC", after):
            if tick > until:
                return
            yield tick


def grace_ms(schedule: Schedule, tick: int) -> int:
    """Return by how many milliseconds a tick may be late without counting as a misfire."""
    following = next_tick(schedule, tick)
    grace = round(schedule.misfire_grace * 1000)
    return grace if following is None else min(grace, max(following - tick, SLACK_MS))


def steps(schedule: Schedule, tick: int, now: int) -> list[TickStep]:
    """Return the steps that a schedule has to take at the time `now`, in order.

    `tick` is its next tick. Both times exclude the jitter. Each step starts at the `following` tick
    of the previous one, and the last step leads to a tick after `now`. The result is empty if the
    tick is not due yet.
    """
    if tick > now:
        return []
    tick = max(tick, 0)
    missed = now - tick > grace_ms(schedule, tick)
    if not missed:
        return _to_steps(schedule, [tick, *_ticks_between(schedule, tick, now)])
    if schedule.misfire == ALL:
        ticks = newest_ticks(schedule, tick, now, CATCH_UP_MAX)
        # Include the tick itself if this does not exceed the limit.
        ticks = [tick, *ticks] if len(ticks) < CATCH_UP_MAX else ticks
        return _to_steps(schedule, ticks, count_ticks(schedule, tick - 1, ticks[0] - 1))
    [newest] = newest_ticks(schedule, tick, now, 1) or [tick]
    # Count this tick separately. If an operator or an older specification has set it, it is not a
    # tick of the present specification.
    before = int(newest != tick) + max(0, count_ticks(schedule, tick, newest) - 1)
    following = next_tick(schedule, newest)
    if schedule.misfire == SKIP:
        return [TickStep(None, following, before + 1)]
    return [TickStep(newest, following, before)]


def _to_steps(schedule: Schedule, ticks: list[int], skipped: int = 0) -> list[TickStep]:
    follow = [*ticks[1:], next_tick(schedule, ticks[-1])]
    return [
        TickStep(tick, following, 0 if at else skipped)
        for at, (tick, following) in enumerate(zip(ticks, follow, strict=True))
    ]


@functools.lru_cache(maxsize=256)  # many schedules have ticks at the same times
def format_tick(tick: int) -> str:
    """Return a tick in the format of the header `x-scheduled-for`, which is ISO 8601 in UTC."""
    instant = datetime.fromtimestamp(tick // 1000, UTC).replace(tzinfo=None).isoformat()
    return f"{instant}.{tick % 1000:03d}Z" if tick % 1000 else f"{instant}Z"
