"""Jobs: the progress of a change that runs in the background, and an act to stop it."""

from __future__ import annotations

import time

from streamqd.admin import dead_letters
from streamqd.admin.messages import MessageFilter
from streamqd.console.access import Role
from streamqd.console.jobs import ConsoleJob
from streamqd.console.view import Act, ActResult, AuditNote, ConsoleView, Context, Preview, Visit

BUDGET = 1_000  # dead letters that the page of a replay examines at most, newest first
SECONDS = 0.3  # seconds that examining them may take


def show_job(visit: Visit) -> Context:
    """Return one job, and the number of replayed messages that became dead letters again."""
    job = visit.resources.backend.jobs.get(visit.path["job"])
    again, complete = _count_dead_again(visit, job)
    return {
        "job": job,
        "again": again,
        "again_complete": complete,
        "rest": _remaining_form(visit, job),
        "host_unix_ms": time.time_ns() // 1_000_000,
    }


def _remaining_form(visit: Visit, job: ConsoleJob) -> dict[str, str]:
    """Return the values of the form for the dead letters that a limited replay left over, or {}.

    Only the person who started the replay gets them, because other persons may not be allowed to
    see the key in its filter.
    """
    if job.running or not job.remaining_form or job.person != visit.person.name:
        return {}
    return {**job.remaining_form, "topic": job.topic}


def _count_dead_again(visit: Visit, job: ConsoleJob) -> tuple[int | None, bool]:
    """Return how many replayed messages are dead letters again, and True if the count is exact.

    The count is None if the job is not a replay.
    """
    if job.replayed_since_unix_ms is None:
        return None, True
    choice = MessageFilter(since_unix_ms=job.replayed_since_unix_ms)
    found = dead_letters.causes(
        visit.resources.store,
        job.topic,
        choice,
        budget=BUDGET,
        stop=dead_letters.stop_after(SECONDS),
    )
    return sum(each.replayed for each in found.causes), found.complete


def preview_stop(visit: Visit) -> Preview:
    """Return the effect of stopping a job."""
    job = visit.resources.backend.jobs.get(visit.path["job"])
    if not job.running:
        return Preview([], refusal=f"The job is already finished: {job.result}")
    return Preview([f"{job.title} would stop after its current batch. Its changes so far remain."])


def stop(visit: Visit) -> ActResult:
    """Request a job to stop after its current batch."""
    job = visit.resources.backend.jobs.get(visit.path["job"])
    job.stopping.set()
    note = AuditNote([job.topic], "job stop", {"job": job.title, "started_by": job.person})
    # The sentence is empty, because the page of the job shows that it is stopping.
    return ActResult("", note)


VIEWS = (ConsoleView("job", "/jobs/{job}", "Job", show_job, live=True),)
ACTS = (
    Act(
        "job_stop",
        "/jobs/{job}/stop",
        "Stop a job",
        "Stop",
        Role.OPERATOR,
        preview_stop,
        stop,
        back="job",
    ),
)
