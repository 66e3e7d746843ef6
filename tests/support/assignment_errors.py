"""A daemon whose functions can be made to raise errors for one of its assignments.

    python -m tests.support.assignment_errors --config streamq.toml …

runs `streamqd` with a wrapper around every function that is called for an assignment, that is, with
the assignment or a part of it as an argument. The daemon appends these calls to the file that
UNIT_ERRORS names: the role of the process, the name of the function, and whether the call was
isolated. To make a call raise once, write its role, its name and an assignment to a file `STRIKE`
next to that file.

streamqd itself contains no wrappers. They are installed before it forks.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from streamqd.logs.lines import process
from streamqd.model import Assignment

VARIABLE = "UNIT_ERRORS"
ROLES = ("supervisor", "housekeeper")
PARTS = (
    *("supervisor", "housekeeper", "store", "policy", "logs", "scoreboard", "process"),
    *("registration", "failures", "long_poll", "idle_reason", "schedules"),
)
# The seam itself, and the calls that it makes after an error. A strike on one of them would be a
# second fault.
SEAM = "isolation"


class StruckError(Exception):
    """The injected error, which no code of streamqd expects."""


class Site(NamedTuple):
    """A function that one of the processes calls for an assignment."""

    role: str
    name: str

    def __str__(self) -> str:
        return f"{self.role} {self.name}"


class Places:
    """The files through which a test and a daemon exchange calls and strikes."""

    def __init__(self, path: Path) -> None:
        self.sites = path
        self.strike_path = path.with_name("STRIKE")
        self.first_path = path.with_name("STRIKE-FIRST")  # a strike that prepares the main one

    def read(self) -> dict[Site, bool]:
        """Return the calls so far. A call maps to True if it was isolated every time."""
        found: dict[Site, bool] = {}
        if self.sites.exists():
            for line in self.sites.read_text().splitlines():
                role, name, isolated = line.split()
                site = Site(role, name)
                found[site] = found.get(site, True) and isolated == "isolated"
        return found

    def arm(self, site: Site, assignment: Assignment, *, first: bool = False) -> None:
        words = [site.role, site.name, "/".join(map(str, assignment))]
        draft = self.strike_path.with_suffix(".draft")
        draft.write_text(" ".join(words))
        draft.replace(self.first_path if first else self.strike_path)

    @property
    def struck(self) -> bool:
        """True if the most recently armed strike has happened."""
        return not self.strike_path.exists()


def subject(value: object) -> tuple[str, int, str] | None:
    """Return the assignment that a value is or refers to, or None if it refers to none.

    If the value names no group, the group is ''.
    """
    if isinstance(value, Assignment):
        return tuple(value)
    if type(value) is tuple and len(value) == 2 and type(value[1]) is int:
        return (*value, "") if isinstance(value[0], str) else None
    if type(value) in _OPAQUE:
        return None
    title = getattr(value, "title", None)
    if isinstance(title, str) and title.startswith("streamqd: worker "):
        place, _, group = title.removeprefix("streamqd: worker ").rpartition(" ")
        topic, _, partition = place.rpartition("/")
        return topic, int(partition), group
    for name in ("assignment", "partition", "slot"):
        found = getattr(value, name, None)
        if isinstance(found, Assignment) or (name != "assignment" and hasattr(found, "assignment")):
            return subject(found)
    return None


_OPAQUE = (str, bytes, int, float, bool, list, dict, set, frozenset, type(None))


class Watch:
    """Observes the calls for assignments in this process."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._isolated: list[tuple[str, int]] = []
        self._seen: set[tuple[str, str, bool]] = set()
        self._pid = 0  # the process that is at work, whose children do not count

    def seam(self, function: FunctionType) -> Callable[..., Any]:
        """Wrap the functions that isolate calls. Return all other functions unchanged.

        These are `run` of the supervisor and `isolate_task` of the housekeeper.
        """
        if function.__name__ == "run":
            return self._isolating(function, 1)
        if function.__name__ == "isolate_task":
            return wraps(function)(lambda *args: self._isolating(function(*args), 0))
        return function

    def _isolating(self, run: Callable[..., Any], place: int) -> Callable[..., Any]:
        @wraps(run)
        def isolated(*args: Any, **named: Any) -> Any:
            found = subject(args[place])
            assert found is not None, args
            self._isolated.append(found[:2])
            try:
                return run(*args, **named)
            finally:
                self._isolated.pop()

        return isolated

    def turn(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function whose first call shows that the process is at work.

        Calls before it belong to the start of the process.
        """

        @wraps(function)
        def begun(*args: Any) -> Any:
            self._pid = os.getpid()
            return function(*args)

        return begun

    def call(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def watched(*args: Any, **named: Any) -> Any:
            role = process.role
            if role in ROLES and self._pid == os.getpid():
                for value in (*args, *named.values()):
                    found = subject(value)
                    if found is not None:
                        self._note(role, name, found)
                        break
            return function(*args, **named)

        return watched

    def _note(self, role: str, name: str, assignment: tuple[str, int, str]) -> None:
        isolated = assignment[:2] in self._isolated
        if (role, name, isolated) not in self._seen:
            self._seen.add((role, name, isolated))
            word = "isolated" if isolated else "alone"
            with self._places.sites.open("a") as file:
                file.write(f"{role} {name} {word}\n")
        for path in (self._places.first_path, self._places.strike_path):
            try:
                armed = path.read_text().split()
            except OSError:
                continue
            place = armed[2].rpartition("/")
            names = [f"{assignment[0]}/{assignment[1]}", assignment[2] or place[2]]
            if armed[:2] == [role, name] and [place[0], place[2]] == names:
                path.unlink()
                raise StruckError(name)


def install(path: Path) -> None:
    """Install the wrappers in all modules that refer to a wrapped function."""
    watch = Watch(Places(path))
    streamqd = importlib.import_module("streamqd")
    for part in pkgutil.iter_modules(streamqd.__path__, "streamqd."):
        if part.name.split(".")[1] in PARTS:  # other parts may need an extra's packages
            module = importlib.import_module(part.name)
            for found in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{part.name}."):
                importlib.import_module(found.name)
    modules = [each for name, each in sys.modules.items() if name.startswith("streamqd.")]
    replaced: dict[object, Callable[..., Any]] = {}
    for module in modules:
        if module.__name__.split(".")[1] in PARTS:
            own = [v for v in vars(module).values() if _module_of(v) == module.__name__]
            for value in own:
                if isinstance(value, FunctionType):
                    replaced[value] = _wrapped(watch, module, value)
                elif inspect.isclass(value):
                    _watch_methods(watch, module, value)
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value in replaced:
                setattr(module, name, replaced[value])


def _module_of(value: object) -> str:
    return str(getattr(value, "__module__", ""))


def _watch_methods(watch: Watch, module: ModuleType, owner: type) -> None:
    for name, method in list(vars(owner).items()):
        if isinstance(method, FunctionType) and not name.startswith("__"):
            setattr(owner, name, _wrapped(watch, module, method))


def _wrapped(watch: Watch, module: ModuleType, function: FunctionType) -> Callable[..., Any]:
    area = module.__name__.removeprefix("streamqd.")
    name = f"{area}:{function.__qualname__}"
    if area.endswith(f".{SEAM}"):
        return watch.seam(function)
    if name in (
        "housekeeper.promoter:Promoter._run_isolated",
        "housekeeper.promoter:Promoter._forget",
    ):
        return function  # the seam calls this function after an error, so it is part of the seam
    if name in ("supervisor.supervisor:Supervisor._tick", "housekeeper:Housekeeper._round"):
        return watch.turn(function)
    return function if inspect.isgeneratorfunction(function) else watch.call(name, function)


if __name__ == "__main__":
    install(Path(os.environ[VARIABLE]))
    importlib.import_module("streamqd.cli").main()
