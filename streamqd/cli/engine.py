"""Start Spark for one command when it is needed, show its progress, and stop it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from streamqd.cli.session import Session
from streamqd.errors import SparkError
from streamqd.words import age

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from streamqd.spark.pipelines.progress import PipelineProgress

_BAR = 24
_EXIT_SECONDS = 5.0  # seconds that a JVM may take to exit after its connection broke
_BROKEN = "Exception while sending command."  # py4j logs it on the root logger with a traceback
_FIXED = {
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.execution.arrow.maxBytesPerBatch": "16m",
}


class Engine:
    """The Spark session of one command. Spark starts when the session is first used."""

    def __init__(
        self, name: str, master: str | None, conf: tuple[str, ...], *, quiet: bool, verbose: bool
    ) -> None:
        self._start = (f"streamqd {name}", master)
        self._conf = dict(_setting(each) for each in conf)
        self._quiet = quiet
        self._verbose = verbose
        self._spark: SparkSession | None = None
        self.start_seconds = 0.0

    def __call__(self, *, light: bool = False) -> SparkSession:
        if self._spark is None:
            from streamqd.spark import session

            with self._starting():
                self._spark = session(*self._start, _FIXED | self._conf, light=light)
            if not self._verbose:
                _suppress_tracebacks(self._spark)
        return self._spark

    def light(self) -> SparkSession:
        """Return a session that starts fast, for work that is mostly done outside Java."""
        return self(light=True)

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        began = time.monotonic()
        if not self._quiet:
            _line("starting Spark")
        try:
            with contextlib.nullcontext() if self._verbose else _suppress_output():
                yield
        except Exception as error:
            if _is_early_exit(error):
                raise SparkError(
                    "Spark's JVM exited before it was ready; run the command with -v to see what"
                    " the JVM printed"
                ) from error
            raise
        finally:
            if not self._quiet:
                _line("")  # clear the line, so that further output starts on an empty one
        self.start_seconds = round(time.monotonic() - began, 3)

    def exit_error(self, error: Exception) -> SparkError | None:
        """Return the error to report if Spark's JVM has exited, or None otherwise.

        Only a JVM that this process started is checked. If the connection to it broke, wait up to
        `_EXIT_SECONDS` for it to exit.
        """
        if self._spark is None:
            return None
        java: subprocess.Popen[bytes] | None = getattr(
            getattr(self._spark.sparkContext, "_gateway", None), "proc", None
        )
        if java is None:
            return None
        code = java.poll()
        if code is None and _is_broken(error):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = java.wait(_EXIT_SECONDS)
        if code is None:
            return None
        return SparkError(
            f"Spark's JVM exited with {_status(code)} before the command was done; run the"
            " command again to continue after the last commit"
        )

    def stop(self) -> None:
        """Stop Spark if it was started, and ignore errors of a JVM that has already exited."""
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]

        if self._spark is not None:
            with warnings.catch_warnings(), contextlib.suppress(Py4JError, OSError):
                warnings.simplefilter("ignore", RuntimeWarning)
                self._spark.stop()


def _suppress_tracebacks(spark: SparkSession) -> None:
    """Suppress the tracebacks that PySpark prints when the JVM exits unexpectedly.

    `Engine.exit_error` describes the problem in a sentence instead.
    """
    server = getattr(spark.sparkContext, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = lambda *_: None
    logging.getLogger().addFilter(lambda record: record.msg != _BROKEN)


def _is_early_exit(error: Exception) -> bool:
    from pyspark.errors import PySparkRuntimeError

    if not isinstance(error, PySparkRuntimeError):
        return False
    return error.getCondition() == "JAVA_GATEWAY_EXITED"


def _is_broken(error: BaseException | None) -> bool:
    """Return True if an error or one of its causes is a broken connection to the JVM."""
    from py4j.protocol import Py4JNetworkError

    while error is not None:
        if isinstance(error, Py4JNetworkError | ConnectionError | EOFError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _status(code: int) -> str:
    """Return an exit status of `Popen` as text, such as `signal 9 (SIGKILL)`."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"signal {-code}"


@contextlib.contextmanager
def _suppress_output() -> Iterator[None]:
    """Discard standard error during the block, including that of processes started in it.

    Errors are still raised, and are printed elsewhere.
    """
    own = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    sys.stderr.flush()
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)
        os.close(null)
        logging.getLogger("SQLQueryContextLogger").disabled = True  # a logger of PySpark


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.startswith("spark."):
        raise click.UsageError(f"--conf {text} is not spark.NAME=VALUE")
    return name, value


@contextlib.contextmanager
def engine(
    session: Session, name: str, master: str | None, conf: tuple[str, ...]
) -> Iterator[Engine]:
    """Provide Spark for the block, and stop it afterwards. Raises SparkError if its JVM exits."""
    from streamqd.spark import need_spark

    quiet = session.quiet or not sys.stderr.isatty()
    lent = Engine(name, master, conf, quiet=quiet, verbose=session.verbose)
    try:
        need_spark()  # fails before any work is done if Spark cannot run
        _ = session.settings  # reports bad settings before Java starts
        yield lent
    except Exception as error:
        if (ended := lent.exit_error(error)) is not None:
            raise ended from error
        raise
    finally:
        lent.stop()


def _line(text: str) -> None:
    click.echo(f"\r\x1b[K{text}", nl=False, err=True)


def bar(session: Session) -> Callable[[PipelineProgress], None]:
    """Return a function that shows progress on a single line, which it overwrites each time.

    The function does nothing if standard error is not a terminal, or with --quiet.
    """
    if session.quiet or not sys.stderr.isatty():
        return lambda _: None

    def show(progress: PipelineProgress) -> None:
        share = progress.done / progress.total if progress.total else 1.0
        full = round(share * _BAR)
        left = "" if progress.left is None else f", {age(progress.left * 1000)} left"
        _line(
            f"{progress.what} [{'#' * full}{'.' * (_BAR - full)}] {share:4.0%}"
            f" {progress.done:,} of {progress.total:,} rows, {progress.rate:,.0f}/s{left}"
        )
        if progress.done >= progress.total:
            click.echo(err=True)

    return show
