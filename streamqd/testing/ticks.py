"""Computes the ticks of a schedule, without a server."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Unpack

from streamqd import handlers
from streamqd.config import Schedule
from streamqd.errors import ConfigError
from streamqd.handlers.options import ScheduleOptions
from streamqd.schedules import record
from streamqd.schedules.ticks import next_tick
from streamqd.testing.declared import TOPIC, handler_reference


def next_ticks(
    handler: Callable[..., object] | None = None,
    /,
    *,
    start: datetime,
    count: int = 1,
    **options: Unpack[ScheduleOptions],
) -> list[datetime]:
    """Return the first `count` ticks of a schedule at or after `start`, in its time zone.

    Pass a handler with `@schedule`, the options of a schedule, or both. If the handler has several
    schedules, also pass the `name` of one of them. Options override those of `@schedule`. If the
    schedule has fewer ticks, the list is shorter. Ticks do not include jitter, like the header
    `x-scheduled-for`. Raises ValueError if `start` has no time zone, and ConfigError if the
    schedule is invalid.
    """
    if start.tzinfo is None:
        raise ValueError(f"start {start} has no time zone; pass tzinfo=UTC, or another zone")
    schedule = _schedule(handler, options)
    found: list[datetime] = []
    after = round(start.timestamp() * 1000) - 1
    while len(found) < count and (tick := next_tick(schedule, after)) is not None:
        found.append(datetime.fromtimestamp(tick / 1000, schedule.zone))
        after = tick
    return found


def _schedule(handler: Callable[..., object] | None, options: ScheduleOptions) -> Schedule:
    given = {"name": "test", "topic": TOPIC}
    if handler is not None:
        reference = handler_reference(handler)
        name = options.get("name")
        tables = [
            each for each in handlers.scheduled.get(reference, []) if name in (None, each["name"])
        ]
        if len(tables) != 1:
            many = f"has {len(tables)} schedules" if tables else "has no such schedule"
            hint = "pass its name" if tables else "put @schedule above it, or pass cron or every"
            raise ConfigError([f"{reference} {many}; {hint}"])
        given |= tables[0]
    plain = handlers.plain_schedule(options)
    try:
        return record.build(given | {key: each for key, each in plain.items() if each is not None})
    except ValueError as error:
        raise ConfigError([str(error)]) from None
