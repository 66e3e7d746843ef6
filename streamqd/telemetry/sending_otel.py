"""The span of a producer's call in OpenTelemetry, from the provider of the sending process."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import propagate, trace

from streamqd.errors import StreamqdError
from streamqd.telemetry.provider import tracer

# This is a proxy, so a provider that the application sets later takes effect.
_tracer = tracer()


class OtelSpan:
    """See `sending.ToolSpan`."""

    def __init__(self, server: Mapping[str, str | int], operation: str, topic: str) -> None:
        """`server` contains the attributes for the address of Redis."""
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
            # The text of any other error may contain a part of the message.
            text = str(error) if isinstance(error, StreamqdError) else None
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, text))
        self._span.end()
