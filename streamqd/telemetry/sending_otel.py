"""Create OpenTelemetry spans for a producer's calls, with the sending process's provider."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import propagate, trace

from streamqd.errors import StreamqdError
from streamqd.telemetry.provider import tracer

# This tracer is a proxy, so it also uses a provider that the application sets later.
_tracer = tracer()


class OtelSpan:
    """A span in OpenTelemetry. It implements `sending.ToolSpan`."""

    def __init__(self, server: Mapping[str, str | int], operation: str, topic: str) -> None:
        """Start the span. `server` contains the attributes with the address of Redis."""
        self._span = _tracer.start_span(
            f"{operation} {topic}",
            kind=trace.SpanKind.PRODUCER,
            attributes={
                "messaging.system": "streamqd",
                "messaging.operation.name": operation,
                "messaging.operation.type": operation,
                "messaging.destination.name": topic,
                **server,
            },
        )
        self.carrier: dict[str, str] = {}
        propagate.inject(self.carrier, trace.set_span_in_context(self._span))

    def note(self, name: str, value: str | int | bool) -> None:
        self._span.set_attribute(name, value)

    def end(self, error: BaseException | None) -> None:
        if error is not None:
            self._span.set_attribute("error.type", type(error).__qualname__)
            # Only streamqd's own errors are safe to record: others may contain parts of the
            # message.
            text = str(error) if isinstance(error, StreamqdError) else None
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, text))
        self._span.end()
