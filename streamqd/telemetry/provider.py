"""Set up OpenTelemetry for streamqd: the provider, the exporter and the sampler.

A setting of streamqd only enables traces. Everything else comes from the standard `OTEL_*`
variables, which the SDK reads: endpoint, headers, resource, sampler, propagators, batch sizes and
limits.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from importlib.metadata import entry_points

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, SamplingResult
from opentelemetry.util.types import Attributes, AttributeValue

from streamqd.config import Settings, topology
from streamqd.telemetry import TelemetryUnavailableError
from streamqd.version import __version__

SCOPE = "streamqd"
FLUSH_SECONDS = 1.0  # seconds that an exiting process waits for the export of its last spans


def resource(instance: str) -> Resource:
    """Return the resource, from `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_SERVICE_NAME` and defaults.

    By default, the service name is `streamqd`, and the instance ID is `daemon.instance`.
    """
    given = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    ours: dict[str, AttributeValue] = {}
    if "service.instance.id=" not in given:
        ours["service.instance.id"] = instance
    if "service.name=" not in given and not os.environ.get("OTEL_SERVICE_NAME"):
        ours["service.name"] = "streamqd"
    return Resource.create(ours)


def server_attributes(settings: Settings) -> dict[str, str | int]:
    """Return the span attributes for the address of Redis, or {} if there are several nodes."""
    server = topology.parse(settings.redis.url)
    if server.path:
        return {"server.address": server.path}
    if server.kind != topology.SERVER:
        return {}
    [address] = server.addresses
    return {"server.address": address.host, "server.port": address.port}


def exporter() -> SpanExporter | None:
    """Return the exporter that OTEL_TRACES_EXPORTER selects, or None if it is set to `none`.

    The default is `otlp` over HTTP. Raises TelemetryUnavailableError.
    """
    name = os.environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if name == "none":
        return None
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", ""
    )
    wanted = name
    if name == "otlp":
        wanted = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    for point in entry_points(group="opentelemetry_traces_exporter", name=wanted):
        try:
            made: SpanExporter = point.load()()
        except Exception as error:  # exporters can come from any package, so any error is possible
            raise TelemetryUnavailableError(
                f"the exporter {name!r} of OTEL_TRACES_EXPORTER cannot be used:"
                f" {type(error).__name__}: {error}"
            ) from error
        return made
    raise TelemetryUnavailableError(
        f"OTEL_TRACES_EXPORTER {name!r} is not installed; set it to otlp, console or none, or"
        f" install the package that provides {wanted}"
    )


def new_provider(instance: str) -> TracerProvider:
    """Create the provider of this process. Call this only after the process has forked.

    Raises TelemetryUnavailableError.
    """
    target = exporter()
    provider = TracerProvider(resource=resource(instance), shutdown_on_exit=False)
    if isinstance(provider.sampler, ParentBased):
        provider.sampler = LinkedSampler(provider.sampler)
    if target is not None:
        provider.add_span_processor(BatchSpanProcessor(target))
    return provider


class LinkedSampler(Sampler):
    """Samples the run of a message if the send of the message was sampled.

    A run is the root of its own trace, with a link to the send. An ordinary sampler would therefore
    decide about it independently of the send. With a ratio of 1%, both the send and the run would
    be sampled for only one in 10,000 messages.
    """

    def __init__(self, base: Sampler) -> None:
        self._base = base

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: trace.SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[trace.Link] | None = None,
        trace_state: trace.TraceState | None = None,
    ) -> SamplingResult:
        """Decide as the base sampler would if the run were a child of its first linked span."""
        parent = trace.get_current_span(parent_context).get_span_context()
        if kind is trace.SpanKind.CONSUMER and links and not parent.is_valid:
            as_parent = trace.NonRecordingSpan(links[0].context)
            parent_context = trace.set_span_in_context(as_parent, parent_context)
        return self._base.should_sample(
            parent_context, trace_id, name, kind, attributes, links, trace_state
        )

    def get_description(self) -> str:
        """Return the name of the sampler, as the SDK requires."""
        return f"Linked{{{self._base.get_description()}}}"


def tracer(provider: trace.TracerProvider | None = None) -> trace.Tracer:
    """Return streamqd's tracer, from the global provider by default."""
    return trace.get_tracer(SCOPE, __version__, provider)


def flush(provider: TracerProvider, seconds: float = FLUSH_SECONDS) -> bool:
    """Export the finished spans within `seconds`. Return False if this takes longer.

    The SDK's `force_flush` ignores its time limit, so it is called in a separate thread.
    """
    done = threading.Event()

    def work() -> None:
        provider.force_flush()
        done.set()

    threading.Thread(target=work, name="span flush", daemon=True).start()
    return done.wait(seconds)
