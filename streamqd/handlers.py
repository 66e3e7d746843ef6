"""Handlers: how user code declares them, how they are found, and how a run's end becomes a value.

User code is imported in children only: in the workers, and in a probe that tells the supervisor
what the modules declare and whether they import at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from streamqd.errand import Errand
from streamqd.errors import HandlerLoadError
from streamqd.message import Message
from streamqd.model import DeadAsked, Failed, Outcome, RetryAsked, Unit

Function = TypeVar("Function", bound=Callable[..., Any])

TRACEBACK_BYTES_MAX = 8192
MESSAGE_CHARS_MAX = 1000
AFTER_MAX = 366 * 86400.0  # seconds that a handler may ask to wait


class Retry(Exception):  # noqa: N818 - a verdict that a handler raises, not an error
    """Raise it in a handler: try this message again, `after` seconds from now.

    Without `after` the wait is the policy's backoff. It counts as a failed attempt.
    """

    def __init__(self, after: float | None = None) -> None:
        super().__init__("retry" if after is None else f"retry after {after} s")
        if after is not None and not 0 <= after <= AFTER_MAX:
            raise ValueError("after is a number of seconds from 0 to one year")
        self.after = after


class Dead(Exception):  # noqa: N818 - a verdict that a handler raises, not an error
    """Raise it in a handler: no attempt will ever succeed, keep the message as a dead letter."""


class SoftTimeout(Exception):  # noqa: N818 - named after the setting that it enforces
    """Raised inside a handler that overran its `timeout`. It counts as a failed attempt."""


@dataclass(frozen=True, slots=True)
class Context:
    """What `on_start` hooks get: which unit this worker handles, and where it may keep files."""

    unit: Unit
    instance: str
    state_dir: Path


class Loaded(NamedTuple):
    """A handler, ready to run, with the hooks of its module."""

    function: Callable[[Message], object]
    on_start: Callable[[Context], object] | None
    on_stop: Callable[[], object] | None


_declared: list[dict[str, Any]] = []


def handler(*, topic: str, group: str, **options: Any) -> Callable[[Function], Function]:
    """Declare the decorated function as the handler of a topic for a group.

    Options are the settings of a `[[consumers]]` table, as `max_attempts=5, timeout="30s"`; the
    configuration file overrides them. The function itself is returned unchanged.
    """

    def declare(function: Function) -> Function:
        reference = f"{function.__module__}:{function.__qualname__}"
        _declared.append({"topic": topic, "group": group, "handler": reference, **options})
        return function

    return declare


# --- finding ------------------------------------------------------------------------------------


def import_paths(base_dir: Path) -> None:
    """Let modules be found beside the configuration file and in the working directory."""
    for path in (str(Path.cwd()), str(base_dir)):
        if path not in sys.path:
            sys.path.insert(0, path)


def load(reference: str, base_dir: Path) -> Loaded:
    """Import `module:function`. Raises HandlerLoadError with one sentence that says where."""
    module_name, _, function_name = reference.partition(":")
    import_paths(base_dir)
    module = _import(module_name)
    function: Any = module
    for part in function_name.split("."):
        function = getattr(function, part, None)
        if function is None:
            raise HandlerLoadError(f"module {module_name} has no function {function_name}")
    if not callable(function):
        raise HandlerLoadError(f"{reference} is not a function")
    if inspect.iscoroutinefunction(function):
        raise HandlerLoadError(
            f"{reference} is an async function; this version runs plain functions only"
        )
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise HandlerLoadError(
            f"{reference} must take exactly one argument, the message ({error})"
        ) from None
    return Loaded(function, getattr(module, "on_start", None), getattr(module, "on_stop", None))


def _import(module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module_name:
            raise HandlerLoadError(
                f"no module named {module_name}: it is looked for beside the configuration file, "
                "in the working directory and on PYTHONPATH"
            ) from None
        place = _own_place(error)
        raise HandlerLoadError(
            f"cannot import {module_name}: {type(error).__name__}: {text_of(error)}{place}"
        ) from error


def _own_place(error: BaseException) -> str:
    """Where an import failed: the innermost line of the user's own code, not of Python's."""
    if isinstance(error, SyntaxError):
        return ""  # its text names file and line
    foreign = ("<", sysconfig.get_path("stdlib"), __file__)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(foreign):
            return f" ({frame.filename}:{frame.lineno})"
    return ""


class Probe(NamedTuple):
    """What a probe child found: what the modules declare, and every problem."""

    declared: list[dict[str, Any]]
    problems: list[str]


def probe(
    modules: Iterable[str],
    references: Iterable[str],
    base_dir: Path,
    timeout: float,
    interrupted: Callable[[], bool] = lambda: False,
) -> Probe:
    """Import modules and resolve references in a forked child, and wait for what it finds.

    A child that dies or hangs is a problem too. When `interrupted` says so it is given up.
    """
    names, wanted = list(modules), list(references)
    errand = Errand(
        lambda: examine(names, wanted, base_dir), title="streamqd: probe", timeout=timeout
    )
    while (found := errand.poll(0.5)) is None:
        if interrupted():
            errand.cancel()
    if found.trouble:
        return Probe([], [f"importing the handler modules failed: {found.trouble}"])
    return Probe(*found.result)


def examine(modules: list[str], references: list[str], base_dir: Path) -> Probe:
    """Import modules and resolve references in this process, which must be one to throw away."""
    problems = []
    _declared.clear()
    import_paths(base_dir)
    for name in modules:
        try:
            _import(name)
        except HandlerLoadError as error:
            problems.append(str(error))
    for reference in [*(found["handler"] for found in _declared), *references]:
        try:
            load(reference, base_dir)
        except HandlerLoadError as error:
            problems.append(str(error))
    return Probe(list(_declared), list(dict.fromkeys(problems)))


# --- the end of a run as a value ------------------------------------------------------------------


def outcome_of(error: BaseException, detail: str) -> Outcome:
    """Turn what a handler raised into an outcome. Never raises, whatever the exception does.

    `detail` is the `dlq_error` setting: none, class, message or traceback.
    """
    try:
        failure = failure_of(error, detail)
        if isinstance(error, Retry):
            return RetryAsked(_wait_asked(error), failure)
    except Exception:  # noqa: BLE001 - an exception's attributes are user code
        name = type(error).__name__
        failure = Failed("" if detail == "none" else name, "", "", (name,))
    if isinstance(error, Dead):
        return DeadAsked("dead", failure)
    return failure


def _wait_asked(error: Retry) -> float | None:
    # A subclass may never have called our __init__, or have put something else there.
    after = getattr(error, "after", None)
    if isinstance(after, int | float) and 0 <= after <= AFTER_MAX:
        return float(after)
    return None


def text_of(error: BaseException) -> str:
    """Return what an exception says of itself. Never raises."""
    try:
        return str(error)
    except BaseException as raised:  # noqa: BLE001 - user code may raise anything
        return f"<its text cannot be had: {type(raised).__name__}>"


def failure_of(error: BaseException, detail: str) -> Failed:
    """Describe an exception as far as `detail` allows. Local variables are never recorded."""
    kind = type(error)
    lineage = []
    for base in kind.__mro__:
        lineage += [f"{base.__module__}.{base.__qualname__}", base.__qualname__]
    text = trace = ""
    if detail in ("message", "traceback"):
        text = text_of(error)[:MESSAGE_CHARS_MAX]
    if detail == "traceback":
        trace = _traceback(error)
    return Failed(
        error_class="" if detail == "none" else _class_name(kind),
        message=text,
        traceback=trace,
        lineage=tuple(lineage),
        timed_out=isinstance(error, SoftTimeout),
    )


def fingerprint(error: BaseException, reference: str) -> str:
    """Return a short stable name for "the same failure": class, innermost frame, handler.

    Never raises.
    """
    place, kind = "", type(error).__name__
    with contextlib.suppress(Exception):  # the class's attributes are user code
        kind = _class_name(type(error))
        frames = traceback.extract_tb(error.__traceback__)
        if frames:
            place = f"{Path(frames[-1].filename).name}:{frames[-1].name}"
    raw = f"{kind}|{place}|{reference}"
    # A path need not be text: it may hold what cannot be encoded.
    return hashlib.sha256(raw.encode("utf-8", "backslashreplace")).hexdigest()[:12]


def _class_name(kind: type[BaseException]) -> str:
    module = kind.__module__
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


def _traceback(error: BaseException) -> str:
    # The first frame is the worker's own call of the handler: of no use to the reader.
    trace = error.__traceback__
    if trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    if len(text) > TRACEBACK_BYTES_MAX:
        half = TRACEBACK_BYTES_MAX // 2 - 20
        text = f"{text[:half]}\n… cut …\n{text[-half:]}"
    return text
