"""Traces with OpenTelemetry, and reports to Sentry. Both are disabled by default.

`sending` creates the spans of producers, and `runs` those of a worker. `provider` sets up
OpenTelemetry for workers. A worker also writes its running spans to a `run_file`. If its process is
killed, the housekeeper exports these spans (`killed`). `sentry` reports errors and transactions.
`messages` reads the parts of a message that traces and reports need.

Other packages use only this module and `killed`, which import OpenTelemetry and Sentry only if the
settings enable them. No threads are started in a process that will fork.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from streamqd import extras
from streamqd.config import Consumer, Settings
from streamqd.model import Assignment
from streamqd.telemetry.sending import SendSpans

if TYPE_CHECKING:
    from streamqd.handlers import Loaded
    from streamqd.message import Message
    from streamqd.telemetry.runs import RunSpans
    from streamqd.telemetry.sending import ToolSpan
    from streamqd.telemetry.sentry import SentryReports

Ids = tuple[str | None, str | None]  # trace ID and span ID


class TelemetryUnavailableError(Exception):
    """Raised if OpenTelemetry or Sentry cannot be used.

    The text is one sentence that contains the remedy.
    """


class FailedRun(NamedTuple):
    """A run that failed, with its verdict and the parts of its error that may be stored.

    `place` identifies the entry of the message. `verdict` is `retry`, `dead` or `release`. If
    `stays` is True, the message keeps its place and runs again there. `asked` is True if the
    handler itself requested the verdict. `error_class`, `text`, `traceback` and `fingerprint` are
    '' if they are unknown, or if the setting `dlq_error` or the hook `redact_error` removes them.
    """

    place: bytes
    message: Message
    verdict: str
    stays: bool
    error: BaseException
    asked: bool = True
    error_class: str = ""
    text: str = ""
    traceback: str = ""
    fingerprint: str = ""


class RunTelemetry:
    """Observes the runs of one worker.

    It wraps the handler, and the worker reports failed runs to it.
    """

    def __init__(self, spans: RunSpans | None, reports: SentryReports | None) -> None:
        self._spans = spans
        self._reports = reports
        self.reports_errors = reports is not None

    @property
    def ids(self) -> Callable[[], Ids] | None:
        """The function that returns the current trace ID and span ID, or None without traces."""
        return None if self._spans is None else self._spans.ids

    def wrap_handler(self, loaded: Loaded) -> Loaded:
        """Return the handler, wrapped so that each call gets a span."""
        for each in (self._reports, self._spans):  # the last wrapper becomes the outermost
            if each is not None:
                loaded = each.wrap_handler(loaded)
        return loaded

    def report(self, run: FailedRun) -> None:
        """Report the error of a failed run.

        This runs code of the user's exception class, which may hang.
        """
        if self._reports is not None:
            self._reports.note_failure(run)

    def note_failure(self, run: FailedRun) -> str:
        """Record a failed run. Return its span as a `traceparent`, or '' if it has none."""
        return "" if self._spans is None else self._spans.note_failure(run)

    def stop(self) -> None:
        """Export the remaining reports and spans.

        Each of the two exports takes no more than 1 s.
        """
        for each in (self._reports, self._spans):
            if each is not None:
                each.stop()


def send_spans(settings: Settings, asked: bool | None) -> SendSpans | None:
    """Return an object that creates a producer's spans, or None if tracing is disabled.

    `asked` is the producer's option `traces`. If it is None, the settings `telemetry.traces` and
    `telemetry.sentry` apply. True enables OpenTelemetry even if the setting does not, and False
    disables both. Raises TelemetryUnavailableError.
    """
    makers: list[Callable[[str, str], ToolSpan]] = []
    if asked or (asked is None and settings.telemetry.traces):
        try:
            from streamqd.telemetry.provider import server_attributes
            from streamqd.telemetry.sending_otel import OtelSpan
        except ImportError as error:
            raise _missing("traces of a producer need OpenTelemetry", error, "otel") from error
        makers.append(partial(OtelSpan, server_attributes(settings)))
    if asked is not False and settings.telemetry.sentry:
        try:
            from streamqd.telemetry.sending_sentry import SentrySpan
        except ImportError as error:
            raise _missing("telemetry.sentry needs Sentry's SDK", error, "sentry") from error
        makers.append(SentrySpan)
    return SendSpans(makers) if makers else None


def run_telemetry(
    settings: Settings, consumer: Consumer, assignment: Assignment
) -> RunTelemetry | None:
    """Return the observer for this worker process, or None if all telemetry is disabled.

    Call this after the fork, because it starts the threads of exporters. Raises
    TelemetryUnavailableError.
    """
    wanted = settings.telemetry
    spans: RunSpans | None = None
    reports: SentryReports | None = None
    if wanted.traces:
        try:
            from streamqd.telemetry.runs import RunSpans
        except ImportError as error:
            raise _missing("telemetry.traces needs OpenTelemetry", error, "otel") from error
        spans = RunSpans(settings, consumer, assignment)
    if wanted.sentry:
        try:
            from streamqd.telemetry.sentry import SentryReports
        except ImportError as error:
            raise _missing("telemetry.sentry needs Sentry's SDK", error, "sentry") from error
        reports = SentryReports(consumer, assignment)
    return RunTelemetry(spans, reports) if spans or reports else None


def _missing(subject: str, error: ImportError, extra: str) -> TelemetryUnavailableError:
    return TelemetryUnavailableError(
        f"{subject}, which cannot be imported ({error}); {extras.hint(extra)}"
    )
