"""The exceptions and results through which a handler decides on a message."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping

from streamqd.message import Message

AFTER_MAX = 366 * 86400.0  # maximum delay in seconds that a handler may request

# The module of these classes, as dead letters and policies name it. It stays the same if the
# classes are moved to another file.
_PACKAGE = "streamqd.handlers"


class Retry(Exception):  # noqa: N818 - a verdict that a handler raises, not an error
    """Raise this in a handler to run the message again, `after` seconds from now.

    Without `after`, the message waits for the consumer's backoff. In both cases, the run counts as
    a failed attempt.

    Raises TypeError if `after` is not a number, and ValueError if it is not between 0 seconds and
    one year.
    """

    __module__ = _PACKAGE

    def __init__(self, after: float | None = None) -> None:
        super().__init__("retry" if after is None else f"retry after {after} s")
        if after is not None and not isinstance(after, int | float):
            raise TypeError(f"Retry: after must be a number of seconds, not {after!r}")
        if after is not None and not 0 <= after <= AFTER_MAX:
            raise ValueError(f"Retry: after must be 0 seconds to one year, not {after!r}")
        self.after = after


class Dead(Exception):  # noqa: N818 - a verdict that a handler raises, not an error
    """Raise this in a handler to dead-letter the message, if you know that a retry cannot help."""

    __module__ = _PACKAGE


class Release(Exception):  # noqa: N818 - a verdict that a handler raises, not an error
    """Raise this in a handler to run the message later, without counting an attempt.

    The worker finishes its running messages, waits for one second, and continues with the oldest
    unhandled message. This delays the whole partition, so use it for a problem that affects all
    messages. To delay only one message, raise `Retry`.
    """

    __module__ = _PACKAGE


class SoftTimeout(Exception):  # noqa: N818 - named after the setting that it enforces
    """Raised inside a handler that exceeds its `timeout`. The run counts as a failed attempt."""

    __module__ = _PACKAGE


class Undecodable(Exception):  # noqa: N818 - a verdict, like Dead
    """The payload does not match the annotation of the handler. The message is dead-lettered."""

    __module__ = _PACKAGE


class Failures(Exception):  # noqa: N818 - a verdict that a handler raises, not an error
    """Raise or return this in a batch handler if some messages failed. The others are acknowledged.

    `failed` maps each failed message to its exception, such as `Retry`, `Dead` or `Release`. If it
    is empty, all messages are acknowledged. Raises TypeError if a key is not a message, or a value
    is not an exception.
    """

    __module__ = _PACKAGE

    def __init__(self, failed: Mapping[Message, BaseException]) -> None:
        super().__init__(f"{len(failed)} messages of the batch have failed")
        for message, error in failed.items():
            if not isinstance(message, Message) or not isinstance(error, BaseException):
                raise TypeError("Failures requires a dict of messages and their exceptions")
        self.failed = dict(failed)


class Result(enum.Enum):
    """A verdict that a handler may return instead of raising an exception.

    ACK acknowledges the message. RETRY, DEAD and RELEASE have the same effect as the exceptions
    `Retry`, `Dead` and `Release`.
    """

    ACK = "ack"
    RETRY = "retry"
    DEAD = "dead"
    RELEASE = "release"


_RAISED: dict[Result, Callable[[], BaseException]] = {
    Result.RETRY: Retry,
    Result.DEAD: lambda: Dead("the handler returned Result.DEAD"),
    Result.RELEASE: Release,
}


def run_error(end: object) -> BaseException | None:
    """Return the error of a run from its exception or return value, or None if it succeeded.

    A returned exception counts as raised. Returning an awaitable or a generator is a TypeError.
    Never raises, even if methods of the value do.
    """
    try:
        return _find_error(end)
    except BaseException as raised:  # noqa: BLE001 - user code may raise anything
        return raised


def _find_error(end: object) -> BaseException | None:
    if isinstance(end, BaseException):
        return end
    if isinstance(end, Result):
        raised = _RAISED.get(end)
        return None if raised is None else raised()
    if inspect.isawaitable(end):
        if inspect.iscoroutine(end):
            end.close()  # avoids Python's warning about a coroutine that was never awaited
        return TypeError("the handler returned an awaitable; define the handler with async def")
    if inspect.isgenerator(end) or inspect.isasyncgen(end):
        return TypeError("the handler returned a generator, whose code does not run; remove yield")
    return None
