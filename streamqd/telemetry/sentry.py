"""Report to Sentry: the errors of failed runs, and a transaction for each run.

The Sentry SDK's client is configured through the `SENTRY_*` variables, or through `sentry_sdk.init`
in the handler's module. Events contain no payloads, keys, headers or local variables. `dlq_error`
and `redact_error` limit the texts of errors.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sentry_sdk
from sentry_sdk.integrations.logging import ignore_logger

from streamqd import handlers, logs
from streamqd.config import Consumer
from streamqd.handlers import Loaded
from streamqd.message import Message
from streamqd.model import Assignment
from streamqd.telemetry import FailedRun, TelemetryUnavailableError
from streamqd.telemetry.messages import message_place, string_headers

EVERY_SECONDS = 60.0  # seconds between two reports of one fingerprint
CAUSES_MAX = 1_000  # fingerprints that are stored
TRACES_MAX = 10_000  # failed runs whose verdicts have not been reported yet
FLUSH_SECONDS = 1.0
RATE = "SENTRY_TRACES_SAMPLE_RATE"


class SentryReports:
    """Reports the runs of one worker to Sentry."""

    def __init__(self, consumer: Consumer, assignment: Assignment) -> None:
        """Start the client of this process. Raises TelemetryUnavailableError."""
        self._assignment = assignment
        self._handler = consumer.handler
        self._texts = consumer.dlq_error in ("message", "traceback")
        self._silent = consumer.dlq_error == "none"
        self._redact: Callable[[str], str] | None = None
        # The time of the last report for each fingerprint (seconds, monotonic).
        self._reported: dict[str, float] = {}
        self._traces: dict[bytes, dict[str, Any]] = {}  # traces of failed runs by place
        self._episode = logs.Episode("telemetry.failed", "telemetry.recovered")
        ignore_logger("streamqd")  # its lines about failed runs would otherwise be sent, too
        try:
            rate = float(os.environ[RATE]) if os.environ.get(RATE) else None
            sentry_sdk.init(
                include_local_variables=False,
                traces_sample_rate=rate,
                in_app_exclude=["streamqd"],
            )
        except Exception as error:  # the DSN or the sample rate is invalid
            raise TelemetryUnavailableError(
                f"telemetry.sentry cannot be used: {type(error).__name__}: {error}; correct the"
                f" variables SENTRY_DSN and {RATE}"
            ) from error

    def wrap_handler(self, loaded: Loaded) -> Loaded:
        """Return the handler, wrapped so that each call gets a transaction."""
        function: Any = loaded.function
        self._redact = loaded.redact
        batch = loaded.signature.batch

        def start_transaction(given: Any) -> contextlib.AbstractContextManager[Any]:
            return self._transaction(given if batch else (given,))

        if loaded.signature.asynchronous:

            @functools.wraps(function)
            async def run(given: Any) -> object:
                with start_transaction(given):
                    return await function(given)
        else:

            @functools.wraps(function)
            def run(given: Any) -> object:
                # The handler runs in a context of its own. Otherwise, the scope could stay active
                # when the exception of the time limit interrupts the run.
                return contextvars.copy_context().run(call, given)

            def call(given: Any) -> object:
                with start_transaction(given):
                    return function(given)

        return loaded._replace(function=run)

    @contextlib.contextmanager
    def _transaction(self, messages: Sequence[Message]) -> Iterator[None]:
        with contextlib.ExitStack() as entered:
            span: Any = None
            try:
                span = self._enter(messages, entered)
            except handlers.SoftTimeout:
                raise
            except Exception as error:  # noqa: BLE001 - the user's hooks, or hostile headers
                self._episode.log_failure(
                    assignment=self._assignment, error=f"{type(error).__name__}: {error}"
                )
            try:
                yield
            except BaseException:
                if span is not None:
                    span.set_status("internal_error")
                    self._store_trace(messages, span.get_trace_context())
                raise

    def _enter(self, messages: Sequence[Message], entered: contextlib.ExitStack) -> Any:
        """Enter the scope and the transaction of a run, and return its span."""
        scope = entered.enter_context(sentry_sdk.isolation_scope())
        first = messages[0]
        for name, value in self._tags(first).items():
            scope.set_tag(name, value)
        transaction = sentry_sdk.continue_trace(
            string_headers(first), op="queue.process", name=self._handler, source="task"
        )
        entered.enter_context(sentry_sdk.start_transaction(transaction))
        name = f"process {self._assignment.topic}"
        span = entered.enter_context(sentry_sdk.start_span(op="queue.process", name=name))
        span.set_data("messaging.system", "streamqd")
        span.set_data("messaging.destination.name", self._assignment.topic)
        span.set_data("messaging.message.id", first.uid)
        span.set_data("messaging.message.body.size", sum(len(each.payload) for each in messages))
        latency = max(0.0, time.time() - first.timestamp)
        span.set_data("messaging.message.receive.latency", round(latency * 1000))
        span.set_data("messaging.message.retry.count", max(each.attempt for each in messages) - 1)
        if len(messages) > 1:
            span.set_data("messaging.batch.message_count", len(messages))
        return span

    def _store_trace(self, messages: Sequence[Message], trace: dict[str, Any]) -> None:
        """Store the trace of a failed run, because its error is reported only after the run."""
        for message in messages:
            while len(self._traces) >= TRACES_MAX:
                self._traces.pop(next(iter(self._traces)), None)
            self._traces[message_place(message)] = trace

    def note_failure(self, run: FailedRun) -> None:
        """Report the error of a run, unless its cause was already reported within the last minute.

        The error is not reported if the handler requested the verdict, or if `dlq_error` is "none".
        """
        trace = self._traces.pop(run.place, None)
        if run.asked or self._silent or not self._is_due(run.fingerprint):
            return
        try:
            with sentry_sdk.new_scope() as scope:
                for name, value in self._tags(run.message).items():
                    scope.set_tag(name, value)
                scope.set_tag("streamqd.verdict", run.verdict)
                context = {"uid": run.message.uid, "attempt": run.message.attempt}
                scope.set_context("message", context)
                if trace is not None:
                    scope.set_context("trace", trace)
                scope.fingerprint = [run.fingerprint] if run.fingerprint else None
                scope.add_event_processor(self._redact_event)
                scope.capture_exception(run.error)
        except handlers.SoftTimeout:
            raise
        except Exception as error:  # noqa: BLE001 - the client's hooks are user code
            self._episode.log_failure(
                assignment=self._assignment, error=f"{type(error).__name__}: {error}"
            )

    def _is_due(self, fingerprint: str) -> bool:
        now = time.monotonic()
        if now - self._reported.get(fingerprint, -EVERY_SECONDS) < EVERY_SECONDS:
            return False
        self._reported.pop(fingerprint, None)
        while len(self._reported) >= CAUSES_MAX:
            del self._reported[next(iter(self._reported))]
        self._reported[fingerprint] = now
        return True

    def _redact_event(self, event: Any, _hint: Any) -> Any:
        """Return an event, in which errors contain only the texts that may be stored."""
        for exception in event.get("exception", {}).get("values", ()):
            text = str(exception.get("value") or "")
            exception["value"] = handlers.redact_text(text, self._redact) if self._texts else ""
            for frame in (exception.get("stacktrace") or {}).get("frames", ()):
                # If the handler's module configures the client, frames may contain local variables.
                frame.pop("vars", None)
        return event

    def _tags(self, message: Message) -> dict[str, str]:
        return {
            "streamqd.topic": self._assignment.topic,
            "streamqd.partition": str(self._assignment.partition),
            "streamqd.group": self._assignment.group,
            "streamqd.handler": self._handler,
            "streamqd.attempt": str(message.attempt),
        }

    def stop(self) -> None:
        """Send the remaining events within FLUSH_SECONDS."""
        if not sentry_sdk.get_client().dsn:
            logs.event(
                "telemetry.failed",
                logging.WARNING,
                assignment=self._assignment,
                error="no event was sent to Sentry: set SENTRY_DSN, or call sentry_sdk.init",
            )
        sentry_sdk.flush(timeout=FLUSH_SECONDS)
