"""Run SQL statements over topics, one after the other, in one session. Each can be canceled."""

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

_POLL = 0.5  # interval of the searches for jobs to cancel
_PATIENCE = 5.0  # seconds that a canceled statement may take to stop
Fits = Callable[[Sequence[str]], None]


class SqlAnswer(NamedTuple):
    """The result of a statement. A statement without a result has no columns."""

    columns: list[str]
    rows: list[tuple[Any, ...]]


class Prompt:
    """Runs statements over topics (tables `topic_NAME`) and dead letters (`dlq_NAME`)."""

    def __init__(
        self, spark: SparkSession, settings: config.Settings, archive: Archive | None
    ) -> None:
        self._spark = spark
        self._settings = settings
        self._archive = archive

    def ask(
        self, statement: str, most: int | None = None, fits: Fits = lambda _: None
    ) -> SqlAnswer:
        """Return the answer, all rows or the first `most` rows, in memory.

        `fits` gets the names of the columns before a query is run, and may refuse them. Raises
        RequestRefusedError or InvalidRequestError for an invalid statement, PipelineError for a
        failed one, and KeyboardInterrupt for a canceled one, whose jobs are canceled too. A
        statement without jobs that does not stop soon is left running.
        """
        check(statement)
        answered: Future[SqlAnswer] = Future()
        tag = f"streamqd-{uuid.uuid4().hex}"
        # Run the statement in a thread, because an interrupt during a call to the JVM would break
        # the connection.
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
        """Cancel the jobs of a statement until it stops, because it may start more jobs."""
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
            self._spark.sparkContext.addJobTag(tag)  # tag of the jobs that this thread starts
            answered.set_result(self._answer(statement, most, fits))
        except Exception as error:  # noqa: BLE001 - it is raised to the one that waits
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
