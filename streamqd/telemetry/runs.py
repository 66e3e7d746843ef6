"""Create the spans of a worker's runs, one for each call of the handler.

`RunSpans.wrap_handler` wraps the handler, so traces cost nothing if they are disabled. The wrapper
ends the span of a successful run. The verdict on a failed run determines how much of its error may
be recorded, so its span stays open until the worker reports the verdict to `note_failure`.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider

from streamqd import handlers, logs
from streamqd.config import Consumer, Settings
from streamqd.handlers import Loaded
from streamqd.message import Message
from streamqd.model import Assignment
from streamqd.telemetry import FailedRun, Ids
from streamqd.telemetry.messages import message_place
from streamqd.telemetry.propagation import (
    TRACEPARENT,
    USUAL_FLAGS,
    USUAL_START,
    USUAL_UNSAMPLED,
    extract_context,
    is_unsampled,
    parse_traceparent,
    previous_run,
    to_traceparent,
)
from streamqd.telemetry.provider import flush, new_provider, server_attributes, tracer
from streamqd.telemetry.run_file import BATCH_CELL_BYTES, CELL_BYTES, NO_CELL, RunFile

LINKS_MAX = 128  # links in the span of a batch, as in the SDK's default
HELD_MAX = 10_000  # messages waiting in place whose last span is stored


class OpenRun:
    """The span of a run that has not been ended yet."""

    __slots__ = ("cell", "context", "ended_ns", "places", "span")

    def __init__(self, span: trace.Span, context: Context, places: list[bytes], cell: int) -> None:
        self.span = span
        self.context = context  # the context in which the handler runs
        self.places = places
        self.cell = cell  # the span's cell in the run file
        self.ended_ns = 0  # unix ns at which the handler returned or raised


class RunSpans:
    """Creates the spans of one worker."""

    def __init__(self, settings: Settings, consumer: Consumer, assignment: Assignment) -> None:
        """Create the provider, which becomes the global one of this process.

        Raises TelemetryUnavailableError.
        """
        self._provider: TracerProvider = new_provider(settings.daemon.instance)
        trace.set_tracer_provider(self._provider)
        self._tracer = tracer(self._provider)
        self._pid = os.getpid()
        self._assignment = assignment
        self._lanes = consumer.lanes
        self._as_parent = settings.telemetry.producer_span == "parent"
        self._state_dir = settings.daemon.state_dir
        self._instance = settings.daemon.instance
        self._file: RunFile | None = None
        self._batch = False
        self._name = f"process {assignment.topic}"
        self._attributes: dict[str, str | int] = {
            "messaging.system": "streamqd",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": assignment.topic,
            "messaging.destination.partition.id": str(assignment.partition),
            "messaging.consumer.group.name": assignment.group,
            "messaging.client.id": settings.daemon.instance,
            "streamqd.handler": consumer.handler,
            **server_attributes(settings),
        }
        # Runs of unsampled sends are skipped only if the sampler would also not sample them.
        sampler = os.environ.get("OTEL_TRACES_SAMPLER", "") or "parentbased_always_on"
        fields = propagate.get_global_textmap().fields
        self._skips = sampler.startswith("parentbased") and TRACEPARENT in fields
        self._open: dict[bytes, OpenRun] = {}  # open spans by place, until the verdict is reported
        # For each message that waits in place, the context of its last run, by place.
        self._last: dict[bytes, trace.SpanContext] = {}
        self._threads = threading.local()
        self._ambient = trace.set_span_in_context(_SkippedRun())
        self._episode = logs.Episode("telemetry.failed", "telemetry.recovered")
        self._attach_ambient()

    # --- the handler ---

    def wrap_handler(self, loaded: Loaded) -> Loaded:
        """Return the handler, wrapped so that each call gets a span."""
        batch = self._batch = loaded.signature.batch
        try:
            self._file = RunFile(
                self._state_dir,
                self._instance,
                1 if batch else max(1, self._lanes),
                BATCH_CELL_BYTES if batch else CELL_BYTES,
            )
        except OSError as error:
            self._file_failed(error)
        function: Any = loaded.function
        if loaded.signature.asynchronous:
            wrapped = self._wrap_async(function, batch)
        else:
            wrapped = self._wrap_sync(function, batch)
        return loaded._replace(function=wrapped)

    def _wrap_sync(self, function: Callable[..., Any], batch: bool) -> Callable[..., Any]:
        def traced(given: Any) -> object:
            opened = self._try_start(given if batch else (given,))
            if opened is None:
                return function(given)
            return self._call(opened, function, given)

        if batch:
            return functools.wraps(function)(traced)
        run = self._skip_unsampled(function, traced)
        if self._lanes == 1:
            return run

        @functools.wraps(function)
        def in_thread(message: Message) -> object:
            if not hasattr(self._threads, "ready"):
                self._attach_ambient()
            return run(message)

        return in_thread

    def _skip_unsampled(
        self, function: Callable[..., Any], traced: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a handler that passes unsampled messages to `function`, and others to `traced`."""
        start, flags, unsampled = USUAL_START, USUAL_FLAGS, USUAL_UNSAMPLED
        head = slice(len(start))

        @functools.wraps(function)
        def run(message: Message) -> Any:
            fields = message._fields
            raw = fields[-1]  # usually the headers
            if raw[flags] in unsampled and raw[head] == start and fields[-2] == b"headers":
                return function(message)  # this check is much cheaper than the next one
            if is_unsampled(message):
                return function(message)
            return traced(message)

        return run if self._skips else functools.wraps(function)(traced)

    def _call(self, opened: OpenRun, function: Callable[..., object], given: object) -> object:
        # The handler runs in a context of its own. Otherwise, the span could stay attached to the
        # thread when the exception of the time limit interrupts the run.
        within = contextvars.copy_context()
        within.run(otel_context.attach, opened.context)
        try:
            end = within.run(function, given)
        except BaseException as error:
            self._note_error(opened, error)
            raise
        self._note_return(opened, end)
        return end

    def _wrap_async(self, function: Callable[..., Any], batch: bool) -> Callable[..., Any]:
        async def traced(given: Any) -> object:
            opened = self._try_start(given if batch else (given,))
            if opened is None:
                return await function(given)
            token = otel_context.attach(opened.context)
            try:
                end = await function(given)
            except BaseException as error:
                self._note_error(opened, error)
                raise
            finally:
                otel_context.detach(token)
            self._note_return(opened, end)
            return end

        return (
            functools.wraps(function)(traced) if batch else self._skip_unsampled(function, traced)
        )

    # --- start and end ---

    def _try_start(self, messages: Sequence[Message]) -> OpenRun | None:
        """Start the span of a run. Return None if this fails.

        The run must not be affected by a problem with telemetry, so no error is raised.
        """
        try:
            return self._start(messages)
        except handlers.SoftTimeout:
            raise  # the time limit of a run includes the time to start its span
        except Exception as error:  # noqa: BLE001 - samplers and propagators may be user code
            self._episode.log_failure(
                assignment=self._assignment, error=f"{type(error).__name__}: {error}"
            )
            return None

    def _start(self, messages: Sequence[Message]) -> OpenRun:
        one = messages[0] if len(messages) == 1 else None
        parent = None if one is None else extract_context(one)
        links = self._links(messages, parent)
        if parent is not None and not self._as_parent:
            parent = trace.set_span_in_context(trace.INVALID_SPAN, parent)  # keeps the baggage
        attributes = self._attributes | _facts(messages)
        now = time.time_ns()
        # A batch has several messages, so its span has no single parent.
        span = self._tracer.start_span(
            self._name,
            context=parent or Context(),
            kind=trace.SpanKind.CONSUMER,
            attributes=attributes,
            links=links,
            start_time=now,
        )
        places = [message_place(message) for message in messages]
        cell = NO_CELL
        if span.is_recording() and self._file is not None:
            try:
                cell = self._file.put(_record(span, self._name, attributes, links, now))
            except OSError as error:
                self._file_failed(error)
        if self._batch:
            self._end_all()  # all verdicts of the previous call have been reported by now
        opened = OpenRun(span, trace.set_span_in_context(span, parent), places, cell)
        for place in places:
            self._open[place] = opened
        return opened

    def _links(self, messages: Sequence[Message], parent: Context | None) -> list[trace.Link]:
        links = []
        for message in messages[:LINKS_MAX]:
            sent = trace.get_current_span(parent or extract_context(message)).get_span_context()
            if sent.is_valid and not (self._as_parent and parent is not None):
                links.append(trace.Link(sent, _facts((message,)) if parent is None else None))
            last = self._last.pop(message_place(message), None) or previous_run(message)
            if last.is_valid:
                links.append(trace.Link(last, {"streamqd.link": "previous_run"}))
        return links[:LINKS_MAX]

    def _note_return(self, opened: OpenRun, end: object) -> None:
        """End the span of a run that returned, unless it returned an error."""
        if os.getpid() != self._pid:
            return  # this is a child process that the handler forked
        error = None if end is None else handlers.run_error(end)
        if error is not None:
            self._note_error(opened, error)
        else:
            self._end_handled(opened)

    def _end_handled(self, opened: OpenRun) -> None:
        """End the span of a run that handled all its messages."""
        opened.span.set_attribute("streamqd.verdict", "ack")
        self._end(opened)
        for place in opened.places:
            self._open.pop(place, None)

    def _note_error(self, opened: OpenRun, error: BaseException) -> None:
        """Record that a run failed. Its span is ended when the verdict is reported."""
        opened.ended_ns = time.time_ns()
        # The type is compared, because `isinstance` can run code of the user's exception class.
        of_messages = issubclass(type(error), handlers.Failures)
        failed = getattr(error, "failed", None) if of_messages else None
        if isinstance(failed, dict):
            opened.span.set_attribute("streamqd.batch.failed_count", len(failed))
            if not failed:
                self._end_handled(opened)

    def note_failure(self, run: FailedRun) -> str:
        """Record the verdict of a failed run, and end its span if it is open.

        Return the span as a `traceparent`, or '' if there is none. The worker stores it with the
        message, so that the next run can link to this one.
        """
        opened = self._open.pop(run.place, None)
        if opened is None:
            return ""
        context = opened.span.get_span_context()
        if not context.is_valid:
            return ""
        if opened.span.is_recording():
            if len(opened.places) == 1:
                opened.span.set_attribute("streamqd.verdict", run.verdict)
            if run.verdict != "release":
                _describe(opened.span, run)
            self._end(opened)
        if run.stays:
            while len(self._last) >= HELD_MAX:
                del self._last[next(iter(self._last))]  # its message has probably moved
            self._last[run.place] = context
        return to_traceparent(context)

    def _end(self, opened: OpenRun) -> None:
        opened.span.end(opened.ended_ns or None)
        if self._file is not None:
            self._file.clear(opened.cell)
            opened.cell = NO_CELL

    def _end_all(self) -> None:
        """End the spans that are still open, because their runs will get no more verdicts."""
        for opened in set(self._open.values()):
            if opened.span.is_recording():
                self._end(opened)
        self._open.clear()

    def _file_failed(self, error: OSError) -> None:
        """Log that the run file cannot be used, so that the spans of killed runs are lost."""
        self._episode.log_failure(assignment=self._assignment, error=f"{self._state_dir}: {error}")

    # --- the process ---

    def ids(self) -> Ids:
        """Return the IDs of the current trace and span for log lines.

        Without a span, both are None.
        """
        context = trace.get_current_span().get_span_context()
        if not context.is_valid:
            return None, None
        return f"{context.trace_id:032x}", f"{context.span_id:016x}"

    def stop(self) -> None:
        """End the open spans, and export all spans within FLUSH_SECONDS."""
        self._end_all()
        if not flush(self._provider):
            logs.event("telemetry.spans_lost", logging.WARNING, assignment=self._assignment)
        if self._file is not None:
            self._file.remove()

    def _attach_ambient(self) -> None:
        """Attach, in this thread, the context that applies whenever no sampled run is active."""
        self._threads.ready = True
        otel_context.attach(self._ambient)


class _SkippedRun(trace.NonRecordingSpan):
    """The current span during the run of a message whose send was not sampled.

    Its context is that of the send, so client libraries in the handler do not start traces of their
    own. The context is read from the message only when a library asks for it, so skipped runs have
    no extra cost. Outside of runs, the context is invalid.
    """

    def __init__(self) -> None:
        super().__init__(trace.INVALID_SPAN_CONTEXT)

    def get_span_context(self) -> trace.SpanContext:
        message = logs.current.message or logs.running.get()
        if not isinstance(message, Message):
            return trace.INVALID_SPAN_CONTEXT
        try:
            return parse_traceparent(message.headers.get(TRACEPARENT, ""))
        except Exception:  # noqa: BLE001 - the handler may have replaced the headers
            return trace.INVALID_SPAN_CONTEXT


def _facts(messages: Sequence[Message]) -> dict[str, str | int]:
    """Return the span attributes of a single message or of a batch."""
    if len(messages) > 1:
        return {"messaging.batch.message_count": len(messages)}
    [message] = messages
    age = time.time() - message.timestamp
    found: dict[str, str | int] = {
        "messaging.message.id": message.uid,
        "messaging.message.body.size": len(message.payload),
        "streamqd.attempt": message.attempt,
        "streamqd.message.age_ms": max(0, round(age * 1000)),
    }
    if message.crash_count:
        found["streamqd.crashes"] = message.crash_count
    if message.replay_count:
        found["streamqd.replays"] = message.replay_count
    return found


def _describe(span: trace.Span, run: FailedRun) -> None:
    """Add an error to a span, but only the texts that `dlq_error` and `redact_error` allow."""
    span.set_attribute("error.type", run.error_class or "_OTHER")
    span.set_status(trace.Status(trace.StatusCode.ERROR, run.text))
    described = {
        "exception.type": run.error_class,
        "exception.message": run.text,
        "exception.stacktrace": run.traceback,
    }
    if run.error_class or run.text:
        span.add_event("exception", {name: each for name, each in described.items() if each})


def _record(
    span: trace.Span,
    name: str,
    attributes: dict[str, str | int],
    links: Sequence[trace.Link],
    started_ns: int,
) -> dict[str, Any]:
    """Return a running span as a record for the run file."""
    parent = getattr(span, "parent", None)
    return {
        "span": to_traceparent(span.get_span_context()),
        "parent": to_traceparent(parent) if parent is not None else "",
        "name": name,
        "attributes": attributes,
        "links": [[to_traceparent(link.context), dict(link.attributes or {})] for link in links],
        "started_ns": started_ns,
    }
