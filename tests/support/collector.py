"""An OTLP collector on loopback: it receives spans over HTTP, as protobuf, and keeps them."""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.waiting import wait_until

KINDS = {1: "internal", 2: "server", 3: "client", 4: "producer", 5: "consumer"}


@dataclass(frozen=True)
class Received:
    """One span. IDs are in hex, and `links` are pairs of a trace and a span."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent: str
    links: list[tuple[str, str]]
    attributes: dict[str, Any]
    error: bool
    status: str  # the text of the status
    events: list[dict[str, Any]]
    seconds: float
    resource: dict[str, Any] = field(repr=False)

    @property
    def ids(self) -> tuple[str, str]:
        """The trace and the span, as links name them."""
        return self.trace_id, self.span_id


class Collector:
    """The server and the spans that it has received. Use it as a context manager."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Received] = []
        self.refuses = False  # it answers 503
        self.hangs = False  # it accepts connections and never answers
        self._closed = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                if outer.hangs:
                    outer._closed.wait()
                    return
                if outer.refuses:
                    self.send_error(503)
                    return
                outer._take(body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that point the SDK at this collector, with short waits."""
        host, port = self._server.server_address[:2]
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{host!s}:{port}",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }

    def spans(self, start: str = "", **attributes: Any) -> list[Received]:
        """Return the spans whose name starts with a text and that have these attributes.

        `__` stands for the dots of an attribute's name.
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
        """Wait until at least `count` such spans are there, and return them."""
        wait_until(
            lambda: len(self.spans(start, **attributes)) >= count,
            timeout=timeout,
            what=f"{count} spans {start} {attributes}, not {self.spans()}",
        )
        return self.spans(start, **attributes)

    def _take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        found = [
            _received(span, _values(group.resource.attributes))
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += found


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
