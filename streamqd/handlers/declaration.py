"""How user code declares handlers, and what it is told at its start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from streamqd.model import Unit

Function = TypeVar("Function", bound=Callable[..., Any])

declared: list[dict[str, Any]] = []  # by the modules that this process has imported


@dataclass(frozen=True, slots=True)
class Context:
    """What `on_start` hooks get: which unit this worker handles, and where it may keep files."""

    __module__ = "streamqd.handlers"

    unit: Unit
    instance: str
    state_dir: Path


def handler(*, topic: str, group: str, **options: Any) -> Callable[[Function], Function]:
    """Declare the decorated function as the handler of a topic for a group.

    Options are the settings of a `[[consumers]]` table, as `max_attempts=5, timeout="30s"`; the
    configuration file overrides them. The function itself is returned unchanged.
    """

    def declare(function: Function) -> Function:
        reference = f"{function.__module__}:{function.__qualname__}"
        declared.append({"topic": topic, "group": group, "handler": reference, **options})
        return function

    return declare
