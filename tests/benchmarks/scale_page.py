"""The results of `make bench-scale` as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

KINDS = ("supervisor", "housekeeper", "workers", "redis")


def table(results: dict[str, Any]) -> str:
    """Return Markdown: what each shape costs at each look, its memory, and the takeovers."""
    parts = [
        _heading(results["sizes"]),
        _table(
            ("shape", "look", *KINDS, "messages/s", "commands/s", "scripts/s", "longer than 5 ms"),
            (_look(shape, name, look) for shape, name, look in _looks(results)),
        ),
        _table(
            (
                "shape",
                "units",
                "all owned, s",
                "backlog handled, s",
                "PSS, MiB",
                "slow at the start",
                "at the end",
            ),
            (_shape(name, found) for name, found in results["shapes"].items()),
        ),
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
    rates = (look["messages/s"], look["commands/s"], look["scripts/s"])
    return (shape, name, *cpu, *(f"{rate:,}" for rate in rates), _slow(look["slow"]))


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
