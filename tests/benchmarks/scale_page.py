"""Show the results of `make bench NAME=scale` as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from tests.benchmarks import markdown

PHASES = (
    ("idle, empty", "no messages"),
    ("promoting, expiring", "due messages are promoted, and expired dead letters are deleted"),
    ("paused, full", "the consumer is paused, and all messages are stored"),
    ("after the death of a worker", "a worker was killed, and all workers handle the backlog"),
    ("at work", "workers handle the rest of the backlog"),
    ("failing", "messages fail and become dead letters"),
    ("idle, full", "the backlog is handled, and the rest is stored"),
)
KINDS = ("supervisor", "housekeeper", "workers", "redis")
RATES = ("messages/s", "commands/s", "scripts/s")
IDLE = ("idle, empty", "paused, full", "idle, full")
DONE = ("promoted", "expired", "trimmed", "recovered", "reclaimed")
_table = partial(markdown.table, rule="---")
START = ("partitions", "first handled after, s", "all handled after, s")


def table(results: dict[str, Any]) -> str:
    """Return Markdown: the cost of each shape in each state, its memory, and the takeovers."""
    parts = [
        _heading(results["sizes"]),
        _table(
            (
                *("shape", "phase", *KINDS, *RATES, "redis, MiB"),
                *("PING p99, ms", "maximum, ms", "longer than 5 ms"),
            ),
            (_state_row(shape, name, state) for shape, name, state in _states(results)),
        ),
        _table(
            (
                "shape",
                "assignments",
                "all owned, s",
                "backlog handled, s",
                "failures dead-lettered, s",
                "PSS, MiB",
                "slow commands at the start",
                "slow commands at the end",
            ),
            (_memory_row(name, found) for name, found in results["shapes"].items()),
        ),
        _table(
            ("shape", "assignments", *(f"{name}: µs/s per assignment" for name in IDLE)),
            (_idle_cost_row(name, found) for name, found in results["shapes"].items()),
        ),
        _table(("shape", *DONE), (_handled_row(*each) for each in results["shapes"].items())),
        _table(
            ("PING of another client, the whole run", "pings", "p99, ms", "maximum, ms"),
            ((name, *_ping_cells(found["another client, ms"])) for name, found in _runs(results)),
        ),
        _table(
            ("longest call of the whole run", "ms"),
            (
                (name, f"{worst:.1f}")
                for name, worst in sorted(_longest(results).items(), key=lambda each: -each[1])
            ),
        ),
        _table(START, [tuple(results["start"][head] for head in START)]),
        _table(
            ("takeover after", "partitions", "all owned, s", "all handled, s", "lease_ttl, s"),
            (_takeover_row(how, found) for how, found in results["takeover"].items()),
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _heading(sizes: dict[str, float]) -> str:
    delayed, bodies = f"{sizes['delayed']:,}", f"{sizes['bytes']:,} bytes"
    stored = (
        f"a backlog of {sizes['backlog']:,} messages",
        f"{delayed} waiting retries and {delayed} delayed sends, half of them due immediately",
        f"{sizes['dead']:,} dead letters, half of them expired",
        f"{sizes['pending']:,} pending messages, half of them of a dead consumer",
        f"{sizes['failing']:,} messages that fail twice",
    )
    return "\n\n".join(
        (
            f"The server stores these messages of {bodies}, and retains {sizes['keep']:,} of them:",
            "\n".join(f"- {each}" for each in stored),
            "Each run has these phases:",
            _table(("phase", "load"), PHASES),
            "CPU is in milliseconds per second.",
        )
    )


def _states(results: dict[str, Any]) -> Iterable[tuple[str, str, dict[str, Any]]]:
    for shape, found in results["shapes"].items():
        for name, state in found["looks"].items():
            yield shape, name, state


def _state_row(shape: str, name: str, state: dict[str, Any]) -> Sequence[object]:
    cpu = [f"{state['CPU, ms/s'][kind]:.1f}" for kind in KINDS]
    rates = [f"{state[rate]:,}" for rate in (*RATES, "redis, MiB")]
    delays = state["another client, ms"]
    _, p99, worst = _ping_cells(delays)
    return (shape, name, *cpu, *rates, p99, worst, _format_slow(state["slow"]))


def _ping_cells(delays: dict[str, float]) -> Sequence[str]:
    """Return the number of pings, the 99th percentile and the maximum."""
    count, p99, worst = delays.values()
    return (f"{count:,}", f"{p99:.1f}", f"{worst:.1f}")


def _memory_row(name: str, found: dict[str, Any]) -> Sequence[object]:
    memory = ", ".join(f"{kind} {size}" for kind, size in found["PSS, MiB"].items())
    return (
        name,
        found["units"],
        found["start to all owned, s"],
        found["backlog handled within, s"],
        found["failing dead within, s"],
        memory,
        _format_slow(found["slow at the start"]),
        _format_slow(found["slow at the end"]),
    )


def _idle_cost_row(name: str, found: dict[str, Any]) -> Sequence[object]:
    """Return the idle cost of supervisor and housekeeper per assignment."""
    assignments = found["units"]
    cpus = [found["looks"][state]["CPU, ms/s"] for state in IDLE]
    return (name, assignments, *(round(_daemon_cpu(cpu) * 1000 / assignments) for cpu in cpus))


def _daemon_cpu(cpu: dict[str, float]) -> float:
    return cpu["supervisor"] + cpu["housekeeper"]


def _handled_row(name: str, found: dict[str, Any]) -> Sequence[object]:
    return (name, *(f"{found['done'][each]:,}" for each in DONE))


def _runs(results: dict[str, Any]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Return every run that had its own server."""
    yield from results["shapes"].items()
    yield "start", results["start"]
    yield from results["takeover"].items()


def _longest(results: dict[str, Any]) -> dict[str, float]:
    """Return the longest time of each command or script that ever exceeded 5 ms."""
    longest: dict[str, float] = {}
    for _, found in _runs(results):
        for name, worst in found["longest, ms"].items():
            longest[name] = max(longest.get(name, 0.0), worst)
    return longest or {"nothing": 0.0}


def _takeover_row(how: str, found: dict[str, Any]) -> Sequence[object]:
    return (
        how,
        found["partitions"],
        found["all owned after, s"],
        found["all handled after, s"],
        found["lease_ttl, s"],
    )


def _format_slow(found: dict[str, dict[str, float]]) -> str:
    both = {**found["events"], **found["commands"]}
    return ", ".join(f"{name} {worst:.1f} ms" for name, worst in both.items()) or "nothing"
