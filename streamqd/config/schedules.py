"""The settings of schedules, and their checks."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo

from cronsim import CronSim, CronSimError

from streamqd.config import problems as wording
from streamqd.config.problems import Problems
from streamqd.config.setting import NAMED, JsonText, Seconds, Shape, describe, setting

ONCE, SKIP, ALL = "once", "skip", "all"
PAYLOAD_BYTES_MAX = 64 << 10
PER_TOPIC_MAX = 10_000
LAST_UNIX_MS = 221_845_392_000_000  # 9000-01-01, the last year that calendars support
CRON_CHARS_MAX = 256
JITTER_MAX = 86_400.0

SCHEDULE_NAME = re.compile(r"[a-z0-9_-][a-z0-9._-]{0,63}")
_NAME = Shape(SCHEDULE_NAME, "use 1 to 64 of a-z 0-9 . _ - and no dot first")
_OVERLAP = Shape(
    re.compile(r"allow|skip:[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}"),
    'write "allow", or "skip:GROUP" with the name of a consumer group',
)
_KEY = Shape(re.compile(r".{1,1024}", re.DOTALL), "write 1 to 1,024 characters")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A message that the fleet sends repeatedly, or once at a given time.

    Set exactly one of cron, every and at.
    """

    name: str = field(
        metadata=describe(
            "The name of the schedule, which must be unique in this Redis.", shape=_NAME
        )
    )
    topic: str = field(metadata=describe("The topic to which the messages are sent.", shape=NAMED))
    cron: str | None = setting(
        None,
        'A cron expression: minute, hour, day of the month, month, day of the week, such as "0 3 *'
        ' * *".',
    )
    every: Seconds | None = setting(
        None,
        "The interval between two messages, counted from 1970-01-01T00:00Z.",
        min=1,
        max=366 * 86_400,
    )
    at: str | None = setting(
        None,
        "The time of a single message with its offset from UTC, such as 2027-01-01T08:00:00+01:00.",
    )
    timezone: str | None = setting(
        None, 'The time zone of cron, such as "Europe/Berlin". Empty means UTC.'
    )
    key: str | None = setting(
        None, "The key of the messages. Empty means the name of the schedule.", shape=_KEY
    )
    partition: int | None = setting(
        None,
        'The partition to which the messages are sent. With "none", the key selects it.',
        min=0,
        max=4_095,
    )
    payload: JsonText = setting(
        "{}", "The payload, which is sent as JSON. A string is sent unchanged. At most 64 KiB."
    )
    misfire: str = setting(
        ONCE,
        "How missed ticks are handled. once: one message is sent, for the newest missed tick."
        " skip: no message is sent. all: a message is sent for each of the newest 100 missed"
        " ticks.",
        choices=(ONCE, SKIP, ALL),
    )
    misfire_grace: Seconds = setting(
        3_600.0,
        "The delay after which a tick counts as missed. A tick that is more than 5 s late is also"
        " missed if the next tick is already due.",
        min=1,
        max=366 * 86_400,
    )
    overlap: str = setting(
        "allow",
        'How a tick is handled while the last message of the schedule is not finished. "allow"'
        ' sends a message. "skip:GROUP" skips the tick while the last message is unread, running'
        " or waiting for a retry in GROUP.",
        shape=_OVERLAP,
    )
    jitter: Seconds = setting(
        0.0,
        "The maximum delay of a schedule's messages. Each schedule has a fixed delay between 0 and"
        " this duration, which is derived from its name. With 0, schedules that are due in the"
        " same minute all send at its start.",
        min=0,
        max=JITTER_MAX,
    )
    # The place where the schedule is declared, for use in problems.
    place: str = field(default="", compare=False, repr=False)

    @property
    def zone(self) -> tzinfo:
        """The time zone of cron."""
        return load_timezone(self.timezone or "UTC")

    @property
    def at_unix_ms(self) -> int | None:
        """The time of `at` in unix milliseconds, or None if `at` is not set."""
        return None if self.at is None else _instant(self.at)

    @property
    def overlap_group(self) -> str:
        """The group in `overlap`, or '' if every tick is sent."""
        return self.overlap.partition(":")[2]


def check_schedule(schedule: Schedule, path: wording.Path, problems: Problems) -> None:
    """Add the problems of one schedule."""
    when = [name for name in ("cron", "every", "at") if getattr(schedule, name) is not None]
    if not problems.ok(*((*path, name) for name in ("cron", "every", "at"))):
        return
    if len(when) != 1:
        found = f"sets {' and '.join(when)}" if when else "has no time"
        problems.add(path, f"{found}, but needs exactly one of cron, every and at")
        return
    for name, fault in (
        ("cron", _cron_fault(schedule.cron)),
        ("at", _at_fault(schedule.at)),
        ("timezone", _zone_fault(schedule)),
        ("every", _every_fault(schedule)),
        ("key", _key_fault(schedule)),
        ("payload", _payload_fault(schedule.payload)),
    ):
        if fault and problems.ok((*path, name)):
            problems.add((*path, name), fault)
    if schedule.every is not None and schedule.jitter >= schedule.every:
        problems.add((*path, "jitter"), "must be shorter than every")


def check_schedules(
    schedules: tuple[Schedule, ...], paths: list[wording.Path], problems: Problems
) -> None:
    """Add the problems of each schedule.

    Duplicate names and topics with too many schedules are also problems.
    """
    first: dict[str, wording.Path] = {}
    counts: dict[str, int] = {}
    for schedule, path in zip(schedules, paths, strict=True):
        if not problems.ok(path):
            continue
        check_schedule(schedule, path, problems)
        other = first.setdefault(schedule.name, path)
        if other != path:
            problems.add(
                (*path, "name"),
                f"{wording.quote(schedule.name)} is already the name of"
                f" {wording.format_path(other)}",
            )
        counts[schedule.topic] = counts.get(schedule.topic, 0) + 1
    for topic, number in counts.items():
        if number > PER_TOPIC_MAX:
            problems.add(
                ("schedules",),
                f"{number:,} schedules send to topic {topic} (maximum: {PER_TOPIC_MAX:,})",
            )


@functools.lru_cache(maxsize=1_024)
def _cron_fault(cron: str | None) -> str:
    if cron is None:
        return ""
    fields = len(cron.split())
    if fields != 5:
        return (
            f"{wording.quote(cron)} has {fields} fields, but needs five (minute, hour, day of the"
            " month, month, day of the week)"
        )
    hint = 'write a cron expression, such as "*/5 * * * *" or "30 2 * * MON-FRI"'
    if len(cron) > CRON_CHARS_MAX:
        return f"is longer than {CRON_CHARS_MAX} characters ({hint})"
    try:
        found = next(CronSim(cron, datetime(2026, 1, 1, tzinfo=UTC)), None)
    except (CronSimError, ValueError, AssertionError) as error:
        part = str(error).replace("Bad ", "")
        return f"{wording.quote(cron)} is not a valid expression{part and f': bad {part}'} ({hint})"
    return "" if found else f"{wording.quote(cron)} never occurs"


def _at_fault(at: str | None) -> str:
    if at is None:
        return ""
    hint = 'write it with its offset, such as "2027-01-01T08:00:00+01:00"'
    try:
        instant = datetime.fromisoformat(at)
    except ValueError:
        return f"{wording.quote(at)} is not a valid time ({hint})"
    if instant.tzinfo is None:
        return f"{wording.quote(at)} has no offset from UTC ({hint})"
    if not 1970 < instant.year < 9000:
        return f"{wording.quote(at)} is outside the years 1971 to 8999 ({hint})"
    return ""


def load_timezone(name: str) -> tzinfo:
    """Return a time zone. Raises KeyError, ValueError or OSError if it is unknown.

    zoneinfo is imported only when it is needed, because it costs 0.6 MiB of memory.
    """
    import zoneinfo

    return zoneinfo.ZoneInfo(name)


def _zone_fault(schedule: Schedule) -> str:
    if schedule.timezone is None:
        return ""
    if schedule.cron is None:
        return "applies only to cron"
    try:
        _ = schedule.zone
    except (KeyError, ValueError, OSError):  # zoneinfo raises KeyError if the zone is not found
        import zoneinfo

        known = {name.lower(): name for name in zoneinfo.available_timezones()}
        meant = wording.nearest_word(schedule.timezone, known)
        hint = f'did you mean "{known[meant]}"?' if meant else 'write one such as "Europe/Berlin"'
        return f"{wording.quote(schedule.timezone)} is not a time zone ({hint})"
    return ""


def _every_fault(schedule: Schedule) -> str:
    if schedule.every is not None and round(schedule.every, 3) != schedule.every:
        return "must be a multiple of 1ms"
    return ""


def _key_fault(schedule: Schedule) -> str:
    if schedule.key is not None and schedule.partition is not None:
        return "cannot be used with partition"
    return ""


def _payload_fault(payload: str) -> str:
    size = len(payload.encode())
    if size <= PAYLOAD_BYTES_MAX:
        return ""
    return (
        f"has {size:,} bytes (maximum: {PAYLOAD_BYTES_MAX:,}); store it elsewhere and send a"
        " reference"
    )


def _instant(at: str) -> int:
    return round(datetime.fromisoformat(at).timestamp() * 1000)
