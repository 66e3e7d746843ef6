"""Check if the instance is alive, started and ready, without calling Redis.

Liveness never depends on Redis. Otherwise, an orchestrator would restart the daemon whenever Redis
is down, which would only make things worse.
"""

from __future__ import annotations

from streamqd.metrics.view import MetricsView, longest_run
from streamqd.scoreboard import InstanceFlags, WorkerState, now_ns

# Seconds without progress after which a process has a problem. A tick of the supervisor takes no
# longer than a second, even while Redis is silent. An idle worker reports progress at least once
# per long poll (`worker.turns.BLOCK_SECONDS`).
SUPERVISOR_SECONDS = 15.0
HOUSEKEEPER_SECONDS = 60.0
WORKER_SECONDS = 60.0


def liveness_problems(view: MetricsView) -> list[str]:
    """Return the reasons why the instance is not alive, or [] if it is."""
    board = view.board
    reasons = []
    if _stale(board.progress_ns, SUPERVISOR_SECONDS):
        reasons.append(f"the supervisor has made no progress for {_age(board.progress_ns):.0f} s")
    if _stale(board.housekeeper_progress_ns, HOUSEKEEPER_SECONDS):
        age = _age(board.housekeeper_progress_ns)
        reasons.append(f"the housekeeper has made no progress for {age:.0f} s")
    return reasons


def startup_problems(view: MetricsView) -> list[str]:
    """Return the reasons why the instance has not started, or [] if it has."""
    if InstanceFlags.STARTED in view.board.flags:
        return []
    return ["the daemon is still starting"]


def readiness_problems(view: MetricsView) -> list[str]:
    """Return the reasons why the instance is not ready for work, or [] if it is."""
    flags = view.board.flags
    reasons = [*startup_problems(view), *liveness_problems(view)]
    if InstanceFlags.DRAINING in flags:
        reasons.append("the daemon is draining")
    if InstanceFlags.REDIS_OK not in flags or not view.redis_up:
        reasons.append("Redis does not answer")
    owned = list(view.owned_slots())
    if not owned and InstanceFlags.STANDBY not in flags:
        reasons.append("this instance owns no partition, and some have no owner")
    if owned and all(slot.state == WorkerState.BROKEN for slot, _ in owned):
        reasons.append("every worker crashes in a loop")
    for slot, assignment in owned:
        figures = view.assignments.get(assignment)
        if (
            slot.state == WorkerState.READY
            and figures is not None
            and figures.lag != 0
            and _stale(slot.progress_ns, WORKER_SECONDS)
            and not longest_run(slot)
        ):
            reasons.append(f"the worker of {assignment} makes no progress")
    return reasons


def _age(at_ns: int) -> float:
    return (now_ns() - at_ns) / 1e9


def _stale(at_ns: int, seconds: float) -> bool:
    # A time of 0 means that the process has not started yet. The startup check reports that.
    return at_ns != 0 and _age(at_ns) > seconds
