"""Run SQL statements over topics in one session. Each statement can be canceled."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from streamqd import config
from streamqd.errors import RequestRefusedError, StreamqdError
from streamqd.spark.pipelines import tables
from streamqd.spark.pipelines.queries import cause_sentence, first_line, to_streamqd_error
from streamqd.spark.pipelines.statements import check
from streamqd.spark.pipelines.storage import Archive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_POLL = 0.5  # seconds between two searches for jobs to cancel
_PATIENCE = 5.0  # maximum seconds to wait until a canceled statement stops
Fits = Callable[[Sequence[str]], None]


class SqlAnswer(NamedTuple):
    """The result of a statement. If the statement returns nothing, there are no columns."""

    columns: list[str]
    rows: list[tuple[Any, ...]]


class Prompt:
    """Runs statements over topics (tables `topic_NAME`) and dead letters (tables `dlq_NAME`)."""

    def __init__(
        self, spark: SparkSession, settings: config.Settings, archive: Archive | None
    ) -> None:
        self._spark = spark
        self._settings = settings
        self._archive = archive

    def ask(
        self, statement: str, most: int | None = None, fits: Fits = lambda _: None
    ) -> SqlAnswer:
        """Run a statement and return its rows, or only the first rows if `most` is set.

        All returned rows are held in memory. Before Spark computes them, `fits` is called with the
        names of the columns, and may raise an error to refuse the query.

        Raises RequestRefusedError or InvalidRequestError if the statement is not valid, and
        PipelineError if it fails. After an interrupt, the statement's jobs are canceled, and
        KeyboardInterrupt is raised. A statement that has no jobs cannot be canceled, so it may
        still be running after that.
        """
        check(statement)
        answered: Future[SqlAnswer] = Future()
        tag = f"streamqd-{uuid.uuid4().hex}"
        # The statement runs in another thread. In this thread, an interrupt during a call to the
        # JVM would break the connection to it.
        asked = (tag, statement, most, fits, answered)
        threading.Thread(target=self._work, args=asked, daemon=True).start()
        try:
            while not answered.done():
                wait([answered], _POLL)
        except KeyboardInterrupt:
            threading.Thread(target=self._cancel, args=(tag, answered), daemon=True).start()
            wait([answered], _PATIENCE)
            raise
        return answered.result()

    def _cancel(self, tag: str, answered: Future[SqlAnswer]) -> None:
        """Cancel a statement's jobs repeatedly until it stops, because it may start new ones."""
        with suppress(Exception):  # the session may have been stopped
            while not answered.done():
                self._spark.sparkContext.cancelJobsWithTag(tag)
                wait([answered], _POLL)

    def _work(
        self,
        tag: str,
        statement: str,
        most: int | None,
        fits: Fits,
        answered: Future[SqlAnswer],
    ) -> None:
        try:
            self._spark.sparkContext.addJobTag(tag)  # marks the jobs that this thread starts
            answered.set_result(self._answer(statement, most, fits))
        except Exception as error:  # noqa: BLE001 - it is raised in the waiting thread
            answered.set_exception(error)

    def _answer(self, statement: str, most: int | None, fits: Fits) -> SqlAnswer:
        from pyspark.errors import AnalysisException, ParseException

        try:
            tables.make_views(self._spark, self._settings, self._archive, statement)
            frame = self._spark.sql(statement)
            fits(frame.columns)
            found = frame.collect() if most is None else frame.take(most)
        except (AnalysisException, ParseException) as error:
            own = cause_sentence(error)
            spark = first_line(error).partition("] ")
            raise RequestRefusedError(
                own if own.startswith("streamq: ") else spark[2] or spark[0]
            ) from error
        except StreamqdError:
            raise
        except Exception as error:
            raise to_streamqd_error(error) from error
        return SqlAnswer(frame.columns, [tuple(row) for row in found])
