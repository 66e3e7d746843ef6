"""Schedules: the list, one schedule with its next ticks, and pause, resume and run."""

from __future__ import annotations

from streamqd.admin import schedules
from streamqd.admin.schedules import MISSING
from streamqd.console.access import Role
from streamqd.console.overview import NOTE, OF_CHECKS
from streamqd.console.view import (
    Act,
    ActResult,
    AuditNote,
    ConsoleView,
    Context,
    Preview,
    Visit,
)
from streamqd.errors import RequestRefusedError
from streamqd.store.schedules import MOVING, ORPHANED, PAUSED, UNREADABLE

TICKS_SHOWN = 5
_BODY = frozenset({"key", "headers", "payload"})
# Maps each state to the level that corresponds to its severity in `doctor`.
LEVELS = {
    **{state: OF_CHECKS[f"schedules.{state}"] for state in (MISSING, ORPHANED, UNREADABLE)},
    **dict.fromkeys((PAUSED, MOVING), NOTE),
}


def show(visit: Visit) -> Context:
    """Return a page of schedules, sorted by name."""
    topic = visit.text("topic") or None
    seen = schedules.list_schedules(
        visit.resources.store, topic, limit=visit.limit, cursor=visit.text("cursor")
    )
    return {
        "seen": seen,
        "topic": topic or "",
        "levels": LEVELS,
    }


def show_one(visit: Visit) -> Context:
    """Return one schedule with its settings and its next ticks."""
    name, store = visit.path["schedule"], visit.resources.store
    detail = schedules.show(store, name)
    try:
        ticks = schedules.next_ticks(store, (), name, None, TICKS_SHOWN).rows
    except RequestRefusedError:
        ticks = []
    reader = visit.reader
    stated = {
        setting: reader.text(str(value)) if setting in _BODY else value
        for setting, value in (detail.specification or {}).items()
        if setting != "name" and value not in ("", "none", None)
    }
    return {"detail": detail, "ticks": ticks, "stated": stated, "levels": LEVELS}


def _note(visit: Visit, command: str) -> AuditNote:
    name = visit.path["schedule"]
    topic = schedules.show(visit.resources.store, name).row.topic
    return AuditNote([topic], command, {"schedules": [name]}, {"changed": 1})


def preview_pause(visit: Visit) -> Preview:
    """Return the effect of pausing a schedule."""
    name = visit.path["schedule"]
    schedules.pause(visit.resources.store, [name], dry_run=True)
    return Preview([f"{name} would send no message until it is resumed. It keeps its due time."])


def pause(visit: Visit) -> ActResult:
    """Pause a schedule."""
    name = visit.path["schedule"]
    note = _note(visit, "schedule pause")
    done = schedules.pause(visit.resources.store, [name])
    return ActResult(f"{name} is paused.", note if done.changed else None)


def preview_resume(visit: Visit) -> Preview:
    """Return the effect of resuming a schedule."""
    name = visit.path["schedule"]
    schedules.resume(visit.resources.store, [name], dry_run=True)
    return Preview([f"{name} would send again. Its misfire setting controls missed ticks."])


def resume(visit: Visit) -> ActResult:
    """Resume a schedule."""
    name = visit.path["schedule"]
    note = _note(visit, "schedule resume")
    done = schedules.resume(visit.resources.store, [name])
    return ActResult(f"{name} is resumed.", note if done.changed else None)


def preview_run(visit: Visit) -> Preview:
    """Return the message that would be sent."""
    done = schedules.run(visit.resources.store, visit.path["schedule"], dry_run=True)
    return Preview(
        [
            f"One message would be sent to {done.topic}/{done.partition} now.",
            f"Its x-scheduled-for is {done.scheduled_for}. Its due time does not change.",
        ]
    )


def run(visit: Visit) -> ActResult:
    """Send a schedule's message now."""
    name = visit.path["schedule"]
    done = schedules.run(visit.resources.store, name)
    note = AuditNote([done.topic], "schedule run", {"schedule": name}, {"sent": 1})
    return ActResult(f"{name} sent {done.uid}.", note)


def _act(name: str, title: str, submit: str, preview, run) -> Act:  # type: ignore[no-untyped-def]
    return Act(
        f"schedule_{name}",
        f"/schedules/{{schedule}}/{name}",
        title,
        submit,
        Role.OPERATOR,
        preview,
        run,
        back="schedule",
    )


VIEWS = (
    ConsoleView("schedules", "/schedules", "Schedules", show, label="Schedules", key="s"),
    ConsoleView("schedule", "/schedules/{schedule}", "Schedule", show_one),
)
ACTS = (
    _act("pause", "Pause a schedule", "Pause", preview_pause, pause),
    _act("resume", "Resume a schedule", "Resume", preview_resume, resume),
    _act("run", "Send a message of a schedule now", "Send now", preview_run, run),
)
