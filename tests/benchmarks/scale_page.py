"""The results of `make bench-scale` as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

KINDS = ("supervisor", "housekeeper", "workers", "redis")
RATES = ("messages/s", "commands/s", "scripts/s")
IDLE = ("idle, empty", "paused, full", "idle, full")


def table(results: dict[str, Any]) -> str:
    """Return Markdown: what each shape costs at each look, its memory, and the takeovers."""
    parts = [
        _heading(results["sizes"]),
        _table(
            ("shape", "look", *KINDS, *RATES, "redis, MiB", "longer than 5 ms"),
            (_look(shape, name, look) for shape, name, look in _looks(results)),
        ),
        _table(
            (
                "shape",
                "units",
                "all owned, s",
                "backlog handled, s",
                "failing dead, s",
                "PSS, MiB",
                "slow at the start",
                "at the end",
            ),
            (_shape(name, found) for name, found in results["shapes"].items()),
        ),
        _table(
            ("shape", "units", *(f"{name}: microseconds of each second and unit" for name in IDLE)),
            (_growth(name, found) for name, found in results["shapes"].items()),
        ),
        _table(("longest of all looks", "ms"), sorted(_longest(results).items())),
        _table(tuple(results["start"]), [tuple(results["start"].values())]),
        _table(
            ("takeover after", "partitions", "all owned, s", "all handled, s", "lease_ttl, s"),
            (_takeover(how, found) for how, found in results["takeover"].items()),
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _heading(sizes: dict[str, float]) -> str:
    return (
        f"{sizes['backlog']:,} messages of backlog, {sizes['delayed']:,} delayed retries and as"
        f" many scheduled sends, {sizes['dead']:,} dead letters and {sizes['failing']:,} messages"
        f" that fail twice, of {sizes['bytes']:,} bytes each; CPU in ms of each second."
    )


def _looks(results: dict[str, Any]) -> Iterable[tuple[str, str, dict[str, Any]]]:
    for shape, found in results["shapes"].items():
        for name, look in found["looks"].items():
            yield shape, name, look


def _look(shape: str, name: str, look: dict[str, Any]) -> Sequence[object]:
    cpu = [look["CPU, ms/s"][kind] for kind in KINDS]
    rates = [f"{look[rate]:,}" for rate in (*RATES, "redis, MiB")]
    return (shape, name, *cpu, *rates, _slow(look["slow"]))


def _shape(name: str, found: dict[str, Any]) -> Sequence[object]:
    memory = ", ".join(f"{kind} {size}" for kind, size in found["PSS, MiB"].items())
    return (
        name,
        found["units"],
        found["start to all owned, s"],
        found["backlog handled within, s"],
        found["failing dead within, s"],
        memory,
        _slow(found["slow at the start"]),
        _slow(found["slow at the end"]),
    )


def _growth(name: str, found: dict[str, Any]) -> Sequence[object]:
    """What supervisor and housekeeper cost for each unit while there is nothing to do."""
    units = found["units"]
    cpus = [found["looks"][look]["CPU, ms/s"] for look in IDLE]
    return (name, units, *(round(_daemon(cpu) * 1000 / units) for cpu in cpus))


def _daemon(cpu: dict[str, float]) -> float:
    return cpu["supervisor"] + cpu["housekeeper"]


def _longest(results: dict[str, Any]) -> dict[str, float]:
    """The longest time of each command or script that was ever longer than 5 ms."""
    longest: dict[str, float] = {}
    for _, _, look in _looks(results):
        for name, worst in {**look["slow"]["events"], **look["slow"]["commands"]}.items():
            longest[name] = max(longest.get(name, 0.0), worst)
    return longest or {"nothing": 0.0}


def _takeover(how: str, found: dict[str, Any]) -> Sequence[object]:
    return (
        how,
        found["partitions"],
        found["all owned after, s"],
        found["all handled after, s"],
        found["lease_ttl, s"],
    )


def _slow(found: dict[str, dict[str, float]]) -> str:
    both = {**found["events"], **found["commands"]}
    return ", ".join(f"{name} {worst:g} ms" for name, worst in both.items()) or "nothing"


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)
