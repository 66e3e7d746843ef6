"""Spark as a command has it: started when it is needed, its progress on the terminal, its end."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from streamqd.cli.session import Session
from streamqd.words import age

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from streamqd.spark.pipelines.progress import PipelineProgress

_BAR = 24
_FIXED = {
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.execution.arrow.maxBytesPerBatch": "16m",
}


class Engine:
    """Spark for one invocation: started when it is first asked for."""

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
        return self._spark

    def light(self) -> SparkSession:
        """One that starts fast, for work that Java has little part in."""
        return self(light=True)

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        began = time.monotonic()
        if not self._quiet:
            _line("starting Spark")
        try:
            with contextlib.nullcontext() if self._verbose else _hushed():
                yield
        finally:
            if not self._quiet:
                _line("")  # what comes next begins a line
        self.start_seconds = round(time.monotonic() - began, 3)

    def stop(self) -> None:
        if self._spark is not None:
            self._spark.stop()


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Let what is started inside write to nowhere: what goes wrong is raised, and printed by us."""
    own = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    sys.stderr.flush()
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)
        os.close(nowhere)
        logging.getLogger("SQLQueryContextLogger").disabled = True  # PySpark's own


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.startswith("spark."):
        raise click.UsageError(f"--conf {text}: write spark.NAME=VALUE")
    return name, value


@contextlib.contextmanager
def engine(
    session: Session, name: str, master: str | None, conf: tuple[str, ...]
) -> Iterator[Engine]:
    """Lend Spark."""
    from streamqd.spark import need_spark

    quiet = session.quiet or not sys.stderr.isatty()
    lent = Engine(name, master, conf, quiet=quiet, verbose=session.verbose)
    try:
        need_spark()  # before half of the work is done
        _ = session.settings  # bad settings are told before Java starts
        yield lent
    finally:
        lent.stop()


def _line(text: str) -> None:
    click.echo(f"\r\x1b[K{text}", nl=False, err=True)


def bar(session: Session) -> Callable[[PipelineProgress], None]:
    """Show progress as one line that is written over, on a terminal only."""
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
