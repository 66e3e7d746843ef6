"""Create Sentry spans for a producer's calls, with the sending process's client."""

from __future__ import annotations

import sentry_sdk


class SentrySpan:
    """A span in Sentry. It implements `sending.ToolSpan`.

    Sentry records it only if the call is made within a transaction.
    """

    def __init__(self, operation: str, topic: str) -> None:
        self._span = sentry_sdk.start_span(op="queue.publish", name=f"{operation} {topic}")
        self._span.set_data("messaging.system", "streamqd")
        self._span.set_data("messaging.destination.name", topic)
        scope = sentry_sdk.get_current_scope()
        self.carrier = dict(scope.iter_trace_propagation_headers(span=self._span))

    def note(self, name: str, value: str | int | bool) -> None:
        self._span.set_data(name, value)

    def end(self, error: BaseException | None) -> None:
        if error is not None:
            self._span.set_status("internal_error")
        self._span.finish()
