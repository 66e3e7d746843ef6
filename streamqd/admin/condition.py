"""Derive the condition of an assignment from its facts, as one stable word. No I/O.

The condition depends on operators' directives first, then on the lease, and then on the state of
the worker.
"""

from __future__ import annotations

RUNNING_SECONDS = 1.0  # age at which a run is long enough to be shown as the condition
STEADY = 0.5  # messages per second by which a lag must change to count as changing
STUCK_SECONDS = 10.0  # age at which a run may be blocking the partition

# Worker states that instances publish under other words than views show.
_WORKERS = {
    "broken": "crash-loop",
    "halted": "circuit-open",
    "probing": "circuit-half-open",
    "full": "keys-held",
    "": "unknown",
}

# All conditions, the most serious first. If the partitions of a group have different conditions,
# the view of the group shows the one that comes first here.
_ORDER = (
    *("failed", "crash-loop", "expired", "free", "gone", "circuit-open", "circuit-half-open"),
    *("flooded", "blocked", "keys-held", "stopped", "paused", "unknown", "booting", "quiet"),
    *("throttled", "recovering", "running", "ready", "query"),
)

ALARMING = frozenset(_ORDER[:10])  # conditions that need an operator's attention

_WORDS = {
    "failed": "internal error",
    "crash-loop": "crash loop",
    "expired": "lease expired",
    "free": "no owner",
    "gone": "worker gone",
    "circuit-open": "circuit open",
    "circuit-half-open": "circuit half-open",
    "flooded": "flood guard",
    "keys-held": "keys held",
    "booting": "starting",
    "quiet": "stopping",
    "query": "Spark query",
}


def condition(
    lease: str, worker: str, run_seconds: float | None, *, paused: bool, stopped: bool
) -> str:
    """Return the condition of an assignment.

    `lease` is owned, expired, free or query. `worker` is the state that the owner publishes, or ''
    if it publishes none. `run_seconds` is the age of the current run.
    """
    if stopped and lease != "owned":
        return "stopped"
    if lease == "free" and worker in ("broken", "failed"):
        return _WORKERS.get(worker, worker)
    if lease != "owned":
        return lease
    long = (run_seconds or 0.0) >= RUNNING_SECONDS
    if worker == "ready" and long:
        return "running"
    if paused or worker == "paused":
        # The worker pauses after its current message, so until then it counts as running.
        return "running" if long else "paused"
    return _WORKERS.get(worker, worker)


def recovery(left: int | None, of: int | None, size: int | None) -> str:
    """Describe the progress of a run in rounds after a crash.

    `left` of the `of` suspects have not run yet. `size` is the number of suspects in the current
    round, or 0 if no round is running.
    """
    this_round = f", round of {size:,}" if size else ""
    return f"{left or 0:,} of {of or 0:,} suspects left{this_round}"


def severity_rank(word: str) -> int:
    """Return the sort key of a condition. The most serious condition has the smallest key."""
    return _ORDER.index(word) if word in _ORDER else _ORDER.index("unknown")


def describe_condition(word: str) -> str:
    """Return the condition in words."""
    return _WORDS.get(word, word)
