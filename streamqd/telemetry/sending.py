"""Create the spans of a producer's calls, with OpenTelemetry, Sentry or both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from streamqd.message import HEADERS_MAX
from streamqd.model import Uid


class ToolSpan(Protocol):
    """A call's span in one tool. `carrier` contains the headers that carry its context."""

    @property
    def carrier(self) -> Mapping[str, str]: ...

    def note(self, name: str, value: str | int | bool) -> None:
        """Set an attribute of the span."""

    def end(self, error: BaseException | None) -> None:
        """End the span, with the error that the call raised, or None."""


class SendSpans:
    """Creates the spans of one producer. It is thread-safe."""

    def __init__(self, makers: list[Callable[[str, str], ToolSpan]]) -> None:
        """Take one function per tool, which starts a span for an operation and a topic."""
        self._makers = makers

    def start(self, topic: object, operation: str = "send") -> SendSpan:
        """Start the span for one send, or for all sends of one call.

        `operation` is `send`, or `create` if the message will be written later.
        """
        return SendSpan([make(operation, str(topic)) for make in self._makers])


class SendSpan:
    """The span of one call of a producer. Use it in a `with` block around the call."""

    def __init__(self, spans: list[ToolSpan]) -> None:
        self._spans = spans
        self._carrier: dict[str, str] = {}
        for name, text in (each for span in spans for each in span.carrier.items()):
            both = name == "baggage" and name in self._carrier
            self._carrier[name] = f"{self._carrier[name]},{text}" if both else text

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        for span in self._spans:
            span.end(None if isinstance(error, GeneratorExit) else error)

    def headers(self, given: Mapping[str, str] | None) -> Any:
        """Return the headers with this call's context added. The caller's headers take precedence.

        The headers are returned unchanged if they already contain a `traceparent` or
        `sentry-trace`, if no more headers fit, or if they are not a mapping.
        """
        carrier = self._carrier
        if not carrier or given is None:
            return carrier or given
        try:
            passed_on = "traceparent" in given or "sentry-trace" in given
            if passed_on or len(given) + len(carrier) > HEADERS_MAX:
                return given
            return {**carrier, **given}
        except TypeError:
            return given

    def carry(self, outgoing: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that adds the context to an item of `send_many`.

        `outgoing` converts an item to an `Outgoing`.
        """

        def with_context(item: Any) -> Any:
            if not self._carrier:
                return item
            made = outgoing(item)
            return made._replace(headers=self.headers(made.headers))

        return with_context

    def note_sent(self, uid: Uid) -> None:
        """Record the uid of the message that was sent."""
        for span in self._spans:
            span.note("messaging.message.id", uid)
            span.note("messaging.destination.partition.id", str(uid.partition))
            if uid.is_duplicate:
                span.note("streamqd.duplicate", True)

    def note_created(self, uid: str) -> None:
        """Record the ID of a message that will be written to Redis later."""
        for span in self._spans:
            span.note("messaging.message.id", uid)

    def sent_many(self, count: int) -> None:
        """Record the number of messages that were written."""
        for span in self._spans:
            span.note("messaging.batch.message_count", count)
