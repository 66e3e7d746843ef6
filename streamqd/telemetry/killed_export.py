"""Turn the records of a run file into spans, and export them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from streamqd.telemetry.propagation import parse_traceparent
from streamqd.telemetry.provider import SCOPE, exporter, resource
from streamqd.telemetry.run_file import RunFileError
from streamqd.version import __version__

_SCOPE = InstrumentationScope(SCOPE, __version__)


def exporting(instance: str) -> Callable[[list[dict[str, Any]], str, str], bool]:
    """Return a function that exports the records of one dead process.

    The returned function gets the records, the kind of exit for `error.type`, and a description of
    the exit. It returns False if the collector did not accept the spans, and raises RunFileError if
    a record is damaged. `exporting` itself raises TelemetryUnavailableError.
    """
    target, of = exporter(), resource(instance)

    def export(records: list[dict[str, Any]], kind: str, how: str) -> bool:
        if target is None:
            return True
        try:
            spans = [_span(record, kind, how, of) for record in records]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunFileError(f"a record is damaged: {type(error).__name__}: {error}") from error
        return target.export(spans) is SpanExportResult.SUCCESS

    return export


def _span(record: dict[str, Any], kind: str, how: str, of: Resource) -> ReadableSpan:
    context = parse_traceparent(record["span"])
    if not context.is_valid:
        raise ValueError("it names no span")
    return ReadableSpan(
        name=str(record["name"]),
        context=context,
        parent=_parent(record["parent"]),
        resource=of,
        attributes={**record["attributes"], "error.type": kind},
        links=[
            trace.Link(parse_traceparent(reference), attributes)
            for reference, attributes in record["links"]
        ],
        kind=trace.SpanKind.CONSUMER,
        status=trace.Status(trace.StatusCode.ERROR, _text(kind, how)),
        start_time=int(record["started_ns"]),
        end_time=max(time.time_ns(), int(record["started_ns"])),
        instrumentation_scope=_SCOPE,
    )


def _parent(reference: str) -> trace.SpanContext | None:
    found = parse_traceparent(reference)
    return found if found.is_valid else None


def _text(kind: str, how: str) -> str:
    return f"the process ended during this run: {how or kind}"
