"""What a handler may say of a message, beside returning: raised, or returned, by user code."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping

from streamqd.message import Message

AFTER_MAX = 366 * 86400.0  # seconds that a handler may ask to wait

# Dead letters and policies name these classes. Where they live among our modules is not their name.
_PACKAGE = "streamqd.handlers"


class Retry(Exception):  # noqa: N818 - a verdict that a handler raises, not an error
    """Raise it in a handler: try this message again, `after` seconds from now.

    Without `after` the wait is the policy's backoff. It counts as a failed attempt.
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
    """Raise it in a handler: no attempt will ever succeed, keep the message as a dead letter."""

    __module__ = _PACKAGE


class Release(Exception):  # noqa: N818 - a verdict that a handler raises, not an error
    """Raise it in a handler: not now, and not this message's fault.

    No attempt is spent. The worker ends its running messages, waits for a second without reading,
    and begins with the oldest unhandled message again. It holds up the partition, so it is for
    trouble that concerns all messages; `Retry` sets one message aside.
    """

    __module__ = _PACKAGE


class SoftTimeout(Exception):  # noqa: N818 - named after the setting that it enforces
    """Raised inside a handler that overran its `timeout`. It counts as a failed attempt."""

    __module__ = _PACKAGE


class Undecodable(Exception):  # noqa: N818 - a verdict, as Dead is
    """The payload is not what the handler's annotation says. The message is dead at once."""

    __module__ = _PACKAGE


class Failures(Exception):  # noqa: N818 - a verdict that a handler raises, not an error
    """Raise it, or return it, in a batch handler: these messages have failed, the others are done.

    `failed` gives each message its exception, which may be `Retry`, `Dead` or `Release` too. An
    empty one means that all are done. TypeError: something in it is no message or no exception.
    """

    __module__ = _PACKAGE

    def __init__(self, failed: Mapping[Message, BaseException]) -> None:
        super().__init__(f"{len(failed)} messages of the batch have failed")
        for message, error in failed.items():
            if not isinstance(message, Message) or not isinstance(error, BaseException):
                raise TypeError("Failures takes a dict of messages and their exceptions")
        self.failed = dict(failed)


class Result(enum.Enum):
    """What a handler may return, for those who rather return than raise."""

    ACK = "ack"
    RETRY = "retry"
    DEAD = "dead"
    RELEASE = "release"


_RAISED: dict[Result, Callable[[], BaseException]] = {
    Result.RETRY: Retry,
    Result.DEAD: lambda: Dead("the handler returned Result.DEAD"),
    Result.RELEASE: Release,
}


def error_of(end: object) -> BaseException | None:
    """Return what is wrong with the end of a run: what it raised, or has returned instead.

    None: the message is done. An exception that is returned counts as raised: no handler returns
    one to say that all is well. Never raises, even if the object that it looks at does.
    """
    try:
        return _error_of(end)
    except BaseException as raised:  # noqa: BLE001 - user code may raise anything
        return raised


def _error_of(end: object) -> BaseException | None:
    if isinstance(end, BaseException):
        return end
    if isinstance(end, Result):
        raised = _RAISED.get(end)
        return None if raised is None else raised()
    if inspect.isawaitable(end):
        if inspect.iscoroutine(end):
            end.close()  # or Python would warn that it was never awaited
        return TypeError("the handler returned something that must be awaited: write async def")
    if inspect.isgenerator(end) or inspect.isasyncgen(end):
        return TypeError("the handler returned a generator, whose code has not run: do not yield")
    return None
