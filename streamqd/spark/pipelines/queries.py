"""Wait for Spark's streaming queries, and convert their errors to single sentences."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from streamqd.errors import (
    RedisResponseError,
    RedisUnavailableError,
    SilentConnectionError,
    SparkError,
    StreamqdError,
)

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_POLL = 0.5  # maximum seconds until an interrupt takes effect
_CAUSE = re.compile(r"\b(?:[a-z_]+\.)*([A-Z]\w+Error): ([^\n]+)")

_AWAY = (RedisUnavailableError.__name__, SilentConnectionError.__name__)

_CALLING = re.compile(
    r"An error occurred while calling "
)  # start of a py4j message, whose next line contains the exception


class PipelineError(SparkError):
    """A pipeline has failed.

    The work that it finished is kept, so fix the cause and run it again.
    """


def wait(queries: Sequence[StreamingQuery], refresh: Callable[[], None] = lambda: None) -> None:
    """Wait until all queries have stopped, and call `refresh` repeatedly.

    An interrupt during a call to the JVM would break the connection to it. An interrupt is
    therefore only recorded at first, and raises KeyboardInterrupt between two calls. Raises the
    error of a query that fails.
    """
    interrupted = threading.Event()
    before: Any = None

    def note(number: int, frame: object) -> None:  # noqa: ARG001
        interrupted.set()
        signal.signal(signal.SIGINT, before)  # a second interrupt takes effect immediately

    ours = threading.current_thread() is threading.main_thread()
    if ours:
        before = signal.signal(signal.SIGINT, note)
    try:
        for query in queries:
            while not query.awaitTermination(_POLL):  # type: ignore[arg-type]
                refresh()
                if interrupted.is_set():
                    raise KeyboardInterrupt
        if interrupted.is_set():  # the interrupt came while the last query was stopping
            raise KeyboardInterrupt
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def convert_errors() -> Iterator[None]:
    """Convert Spark's errors in a `with` block, as `to_streamqd_error` does."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JError, PySparkException) as error:
        raise to_streamqd_error(error) from error


def to_streamqd_error(error: Exception) -> StreamqdError:
    """Convert an error from Spark to an error of streamqd.

    Returns RedisUnavailableError if a task or the planning could not reach Redis,
    RedisResponseError if Redis rejected a command, and PipelineError for all other errors. Spark
    passes only the name and the text of an exception between processes, so the text is searched for
    the cause.
    """
    found = _CAUSE.findall(str(error))
    name, text = found[-1] if found else ("", "")
    if name in _AWAY:
        return RedisUnavailableError(text.strip(), sent=True)
    if name == RedisResponseError.__name__:
        return RedisResponseError(text.partition(" ")[0], text.strip())
    return PipelineError(cause_sentence(error))


def cause_sentence(error: Exception) -> str:
    """Return the cause of an error from Spark as a sentence.

    If the cause is an error from Python, Spark's own text is left out.
    """
    found = _CAUSE.findall(str(error))
    if found:
        return str(found[-1][1]).strip()
    return first_line(error)


def first_line(error: Exception) -> str:
    """Return the first line of Spark's message, without error codes and prefixes.

    The prefixes come from py4j and from Spark's scheduler, which only pass on the error.
    """
    lines = str(error).strip().splitlines()
    called = _CALLING.match(lines[0]) and len(lines) > 1
    line = lines[1].removeprefix(": ") if called else lines[0]
    cause = line.rpartition("SparkException: ")[2] or line
    return cause.partition(" SQLSTATE:")[0]
