"""Jobs: the progress of a replay or a purge that runs in the background, and its stop."""

from __future__ import annotations

from streamqd.console.access import Role
from streamqd.console.view import Act, ActResult, ConsoleView, Context, Preview, Visit


def show_job(visit: Visit) -> Context:
    """Return one job with its progress."""
    return {"job": visit.desk.backend.jobs.get(visit.path["job"])}


def preview_stop(visit: Visit) -> Preview:
    """Return what stopping a job would do."""
    job = visit.desk.backend.jobs.get(visit.path["job"])
    if not job.running:
        return Preview([], refusal=f"The job has finished: {job.result}")
    return Preview([f"{job.title} would stop after its current batch. Its changes so far remain."])


def stop(visit: Visit) -> ActResult:
    """Stop a job."""
    job = visit.desk.backend.jobs.get(visit.path["job"])
    job.stopping.set()
    return ActResult("The job stops after its current batch.", "job", {"job": job.id})


VIEWS = (ConsoleView("job", "/jobs/{job}", "Job", show_job, live=True, example="/jobs/JOB"),)
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
        example="/jobs/JOB/stop",
    ),
)
