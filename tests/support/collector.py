"""An OTLP collector on loopback, which receives spans as protobuf over HTTP and keeps them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.receiver import receiving
from tests.support.waiting import wait_until

KINDS = {1: "internal", 2: "server", 3: "client", 4: "producer", 5: "consumer"}


@dataclass(frozen=True)
class Received:
    """A received span. IDs are in hex, and `links` contains pairs of a trace and a span."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent: str
    links: list[tuple[str, str]]
    attributes: dict[str, Any]
    error: bool
    status: str  # the text of the span's status
    events: list[dict[str, Any]]
    seconds: float
    resource: dict[str, Any] = field(repr=False)

    @property
    def ids(self) -> tuple[str, str]:
        """The IDs of trace and span, as links name them."""
        return self.trace_id, self.span_id


class Collector:
    """A collector that keeps the spans received at `address`."""

    def __init__(self) -> None:
        self.address = ""
        self.refuses = False  # if True, it answers 503
        self.hangs = False  # if True, it accepts connections and never answers
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._spans: list[Received] = []

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that point the SDK at this collector, with short waits."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{self.address}",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }

    def spans(self, start: str = "", **attributes: Any) -> list[Received]:
        """Return the spans whose name starts with a text and that have these attributes.

        In the name of a keyword argument, write `__` for the dots in the attribute's name.
        """
        wanted = {name.replace("__", "."): value for name, value in attributes.items()}
        with self._lock:
            return [
                span
                for span in self._spans
                if span.name.startswith(start)
                and all(span.attributes.get(name) == each for name, each in wanted.items())
            ]

    def wait(self, count: int, start: str = "", timeout: float = 20.0, **attributes: Any) -> Any:
        """Wait until at least `count` such spans have arrived, and return them."""
        wait_until(
            lambda: len(self.spans(start, **attributes)) >= count,
            timeout=timeout,
            what=f"{count} spans {start} {attributes}, not {self.spans()}",
        )
        return self.spans(start, **attributes)

    def _take(self, body: bytes) -> int:
        if self.hangs:
            self._closed.wait()
        if self.hangs or self.refuses:
            return 503
        request = ExportTraceServiceRequest.FromString(body)
        found = [
            _received(span, _values(group.resource.attributes))
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += found
        return 200


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector while the block runs."""
    collector = Collector()
    with receiving(collector._take) as collector.address:
        try:
            yield collector
        finally:
            collector._closed.set()


def _received(span: Any, resource: dict[str, Any]) -> Received:
    return Received(
        span.name,
        KINDS[span.kind],
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        _values(span.attributes),
        span.status.code == 2,
        span.status.message,
        [{"name": event.name, **_values(event.attributes)} for event in span.events],
        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        resource,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
