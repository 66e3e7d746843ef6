"""The daemon, with a supervisor that makes every plan twice.

    python -m tests.support.planned_twice --config streamq.toml …

runs `streamqd`. It exits with an AssertionError if making a plan changes the state of a part, or
writes to the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from streamqd import logs
from streamqd.supervisor import supervisor
from streamqd.supervisor.plan import Action

PARTS = ("partitions", "rebalancer", "capacity", "replacement", "limits", "drain", "control")


def read_state(value: object) -> object:
    """Return the state of a part or a partition, without memory that it shares with workers."""
    if isinstance(value, dict):
        return {key: read_state(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [read_state(each) for each in value]
    if type(value).__module__.startswith(("streamqd.supervisor", "streamqd.policy")):
        return read_state(getattr(value, "__dict__", repr(value)))
    return repr(value)


@contextmanager
def refuse_logging() -> Iterator[None]:
    """Raise an error if an event is logged."""
    event = logs.event

    def refuse(name: str, *_: object, **__: object) -> None:
        raise AssertionError(f"a plan logs {name}")

    logs.event = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        logs.event = event


def plan_twice(plan_actions: Callable[..., list[Action]], *parts: object) -> list[Action]:
    """Return the planned actions. Raises AssertionError if planning leaves a trace."""
    before = [read_state(part) for part in parts]
    with refuse_logging():
        first, second = plan_actions(), plan_actions()
        if first != second:  # a worker has changed its slot in between, which happens only once
            first, second = second, plan_actions()
    assert first == second, f"a plan is repeated differently: {first}, then {second}"
    after = [read_state(part) for part in parts]
    changed = [
        type(part).__name__
        for part, was, now in zip(parts, before, after, strict=True)
        if was != now
    ]
    assert not changed, f"a plan changes {changed}"
    return first


def main() -> None:
    """Run the command given by the arguments."""
    from streamqd.cli import main as streamqd

    plan_actions = supervisor.Supervisor._plan_actions

    def ask_twice(self: supervisor.Supervisor, seen: Any) -> list[Action]:
        parts = [getattr(self, name) for name in PARTS]
        return plan_twice(lambda: plan_actions(self, seen), *parts)

    supervisor.Supervisor._plan_actions = ask_twice  # type: ignore[method-assign]
    streamqd()


if __name__ == "__main__":
    main()
