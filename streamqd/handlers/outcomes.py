"""Turn the exception of a run into an outcome, which is the value that policies decide on."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, NamedTuple

from streamqd.config import mask_passwords
from streamqd.handlers.verdicts import AFTER_MAX, Dead, Release, Retry, SoftTimeout, Undecodable
from streamqd.model import DeadAsked, Failed, Outcome, ReleaseAsked, RetryAsked
from streamqd.policy.fingerprint import fingerprint as fingerprint_of
from streamqd.policy.fingerprint import innermost_frame

TRACEBACK_BYTES_MAX = 8192
MESSAGE_CHARS_MAX = 1000
STACKS_MAX = 64  # failure places whose texts are cached

# Between the call of a handler and its first line, there may be frames from these directories.
_PACKAGE = Path(__file__).parent.parent
_OURS = tuple(f"{_PACKAGE / name}/" for name in ("django", "handlers", "worker", "telemetry"))

_SILENT = "<exception str() failed>"  # the text that Python's own tracebacks show

_OUTCOMES = (Retry, Dead, Undecodable, Release)

# For these exceptions, a traceback of Python shows more than the class and the text.
_DETAILED = (SyntaxError, ImportError, NameError, AttributeError)

# The frames of a failure. Each is given by the id() of its code and the offset of the instruction.
_Places = tuple[int, ...]


class _StackInfo(NamedTuple):
    """The cached texts for one place where failures occur.

    `codes` keeps the code objects alive, so that no new code object can get the id() of one of
    them.
    """

    codes: list[CodeType]
    frame: str  # the frame in the form that fingerprints contain
    place: str  # the place in the form that reports show
    prints: dict[tuple[Any, str], str]  # fingerprints by class and handler
    stack: list[str]  # the formatted stack, empty until it is first used


_stack_infos: dict[_Places, _StackInfo] = {}


def to_outcome(error: BaseException, detail: str) -> Outcome:
    """Turn the exception of a handler into an outcome.

    Never raises, even if methods of the exception do. `detail` is the `dlq_error` setting: none,
    class, message or traceback.
    """
    try:
        failure = describe_failure(error, detail)
        if is_a(error, Retry):
            return RetryAsked(_wait_asked(error), failure)
    except BaseException:  # noqa: BLE001 - attributes of the exception are user code
        name = type.__dict__["__name__"].__get__(type(error))
        failure = Failed("" if detail == "none" else name, "", "", (name,))
    if is_a(error, Dead):
        return DeadAsked("dead", failure)
    if is_a(error, Undecodable):
        return DeadAsked("undecodable", failure)
    if is_a(error, Release):
        return ReleaseAsked()
    return failure


def is_a(error: object, *kinds: type) -> bool:
    """Return True if the type of `error` is one of `kinds`. Never raises.

    Unlike `isinstance`, this does not read `__class__`, because that may run user code.
    """
    return issubclass(type(error), kinds)


def to_brief_outcome(error: BaseException, detail: str) -> Outcome:
    """Return the outcome without the text and the traceback, which only dead letters need."""
    detail = detail if detail == "none" else "class"
    kind: Any = type(error)  # hashable, although mypy cannot infer it
    try:
        plain = None if is_a(error, *_OUTCOMES) else _brief(kind, detail)
    except BaseException:  # noqa: BLE001 - attributes of the class are user code
        plain = None
    return plain or to_outcome(error, detail)


@lru_cache(maxsize=256)
def _brief(kind: Any, detail: str) -> Failed:
    name = "" if detail == "none" else _class_name(kind)
    return Failed(name, "", "", class_lineage(kind), issubclass(kind, SoftTimeout))


def _wait_asked(error: BaseException) -> float | None:
    # A subclass may not call our __init__, or may overwrite the attribute.
    after = getattr(error, "after", None)
    if isinstance(after, int | float) and 0 <= after <= AFTER_MAX:
        return float(after)
    return None


class Description:
    """Describes an exception in text for people. The methods never raise.

    `str()` of the exception is user code that may be slow or hang, so it is called only once.
    """

    __slots__ = ("_error", "_info", "_message")

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self._message: tuple[str, bool] | None = None
        self._info = _read_stack_info(_trace_of(error))

    def text(self) -> str:
        """Return the text of the exception, with passwords masked."""
        message, _ = self._message = self._message or _read_message(self._error)
        return mask_passwords(message[:MESSAGE_CHARS_MAX])

    def place(self) -> str:
        """Return the innermost line of the user's own code, such as `shop.py:41`.

        If no line belongs to user code, return the innermost line. Return '' if there is no
        traceback.
        """
        return self._info.place

    def traceback(self) -> str:
        """Return the traceback, or '' for Undecodable, whose stack contains no user code."""
        if is_a(self._error, Undecodable):
            return ""
        message, well = self._message = self._message or _read_message(self._error)
        try:
            return _traceback(self._error, self._info, message if well else _SILENT)
        except BaseException:  # noqa: BLE001 - an exception's attributes are user code
            return ""

    def fingerprint(self, reference: str) -> str:
        """Return a short, stable ID for failures with the same class, user frame and handler."""
        kind: Any = type(self._error)
        prints = self._info.prints
        try:
            found = prints.get((kind, reference))
            if found is None:
                found = fingerprint_of(_class_name(kind), self._info.frame, reference)
                if len(prints) < STACKS_MAX:
                    prints[kind, reference] = found
        except BaseException:  # noqa: BLE001 - the class's attributes are user code
            found = fingerprint_of(type.__dict__["__name__"].__get__(kind), "", reference)
        return found


def error_text(error: BaseException) -> str:
    """Return the text of an exception. Never raises."""
    return _read_message(error)[0]


def _read_message(error: BaseException) -> tuple[str, bool]:
    """Return the text of an exception and True.

    If `str()` raises, return a replacement and False.
    """
    try:
        return str(error), True
    except BaseException as raised:  # noqa: BLE001 - user code may raise anything
        return f"<exception text unavailable: {type(raised).__name__}>", False


def describe_failure(error: BaseException, detail: str) -> Failed:
    """Describe an exception in as much detail as `detail` allows.

    Local variables are never included.

    `detail` is the `dlq_error` setting: none, class, message or traceback.
    """
    kind: Any = type(error)  # hashable, although mypy cannot infer it
    text = trace = ""
    if detail in ("message", "traceback"):
        described = Description(error)
        text = described.text()
        trace = described.traceback() if detail == "traceback" else ""
    return Failed(
        error_class="" if detail == "none" else _class_name(kind),
        message=text,
        traceback=trace,
        lineage=class_lineage(kind),
        timed_out=is_a(error, SoftTimeout),
    )


@lru_cache(maxsize=256)
def class_lineage(kind: Any) -> tuple[str, ...]:
    """Return the names that policies may use for a class and its bases, most derived first.

    If a package re-exports a class, that name is included, too. For example,
    requests.ConnectionError is defined in requests.exceptions.
    """
    names = []
    for base in kind.__mro__:
        module, name = base.__module__, base.__qualname__
        names += [f"{module}.{name}", name]
        while module := module.rpartition(".")[0]:
            if getattr(sys.modules.get(module), name, None) is base:
                names.append(f"{module}.{name}")
    return tuple(names)


def _user_traceback(begin: TracebackType | None) -> TracebackType | None:
    # The first frame is the worker's own call of the handler, and more frames of streamqd may
    # follow. Readers do not need them, so they are left out.
    trace = begin
    while trace is not None and trace.tb_next is not None:
        first = trace is begin
        if not first and not trace.tb_frame.f_code.co_filename.startswith(_OURS):
            break
        trace = trace.tb_next
    return trace


# Reads the traceback through the base class, because a user's class may override the attribute.
_trace_of: Callable[[BaseException], TracebackType | None]
_trace_of = BaseException.__dict__["__traceback__"].__get__


def _class_name(kind: type[BaseException]) -> str:
    module = kind.__module__
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


def _traceback(error: BaseException, seen: _StackInfo, message: str) -> str:
    trace = _user_traceback(_trace_of(error))
    context = None if error.__suppress_context__ else error.__context__
    alone = error.__cause__ is context is None and not isinstance(error, BaseExceptionGroup)
    if alone and trace is not None:
        text = f"Traceback (most recent call last):\n{_stack(seen, trace)}{_end(error, message)}"
    else:
        text = "".join(traceback.format_exception(type(error), error, trace))
    if len(text) > TRACEBACK_BYTES_MAX:
        half = TRACEBACK_BYTES_MAX // 2 - 20
        text = f"{text[:half]}\n… cut …\n{text[-half:]}"
    return mask_passwords(text)


def _end(error: BaseException, message: str) -> str:
    """Return the last lines of a traceback. This is much cheaper than the `traceback` module."""
    kind: Any = type(error)
    name = _heading(kind)
    if not name or getattr(error, "__notes__", None) is not None:
        return "".join(traceback.format_exception_only(kind, error))
    return f"{name}: {message}\n" if message else f"{name}\n"


@lru_cache(maxsize=256)
def _heading(kind: Any) -> str:
    """Return the class name for a traceback's last line, or '' if Python prints more than that."""
    module = kind.__module__
    if not isinstance(module, str) or issubclass(kind, _DETAILED):
        return ""
    bare = module in ("__main__", "builtins")
    return str(kind.__qualname__) if bare else f"{module}.{kind.__qualname__}"


def _stack(seen: _StackInfo, trace: TracebackType) -> str:
    """Return the frames of a traceback as text, which is cached after the first call.

    Without the cache, finding the source lines and the parts to underline would take longer than
    everything else about a dead letter.
    """
    stack = seen.stack
    if not stack:
        stack.append("".join(traceback.format_tb(trace)))
    return stack[0]


def _read_stack_info(begin: TracebackType | None) -> _StackInfo:
    """Return the cached texts for a place of failure. Many failures usually have the same place."""
    places: list[int] = []
    each = begin
    while each is not None:
        places += (id(each.tb_frame.f_code), each.tb_lasti)
        each = each.tb_next
    key = tuple(places)
    seen = _stack_infos.get(key)
    if seen is None:
        if len(_stack_infos) >= STACKS_MAX:
            _stack_infos.clear()
        codes = [frame.f_code for frame, _ in traceback.walk_tb(begin)]
        trace = _user_traceback(begin)
        names = (each.f_code for each, _ in traceback.walk_tb(trace))
        frame = innermost_frame((code.co_filename, code.co_name) for code in names)
        lines = ((each.f_code.co_filename, str(line)) for each, line in traceback.walk_tb(trace))
        seen = _stack_infos[key] = _StackInfo(codes, frame, innermost_frame(lines), {}, [])
    return seen
