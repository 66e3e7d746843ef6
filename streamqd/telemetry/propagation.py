"""Carry a send's trace context in message headers, and store references to runs in entries."""

from __future__ import annotations

import re

from opentelemetry import propagate, trace
from opentelemetry.context import Context

from streamqd.message import LAST_RUN, RUN_REFERENCE, Message, has_field
from streamqd.telemetry.messages import string_headers

TRACEPARENT = "traceparent"
# Matches an unsampled context in the JSON of the headers: the last bit of its flags is 0.
_UNSAMPLED = re.compile(
    rb'"traceparent": ?"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f][02468ace]"',
)
# The headers as streamqd's producers write them: their first bytes, the position of the flags, and
# the flags of an unsampled context.
USUAL_START = b'{"traceparent":"00-'
USUAL_FLAGS = slice(69, 72)
USUAL_UNSAMPLED = frozenset({b'00"', b'02"'})  # 02 means that the trace ID is random


def to_traceparent(context: trace.SpanContext) -> str:
    """Return a span context in the format of a `traceparent` header."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 0xFF:02x}"


def parse_traceparent(reference: str) -> trace.SpanContext:
    """Return the span context in a `traceparent` value.

    If the value cannot be parsed, the returned context is invalid.
    """
    found = RUN_REFERENCE.fullmatch(reference)
    if found is None:
        return trace.INVALID_SPAN_CONTEXT
    trace_id, span_id, flags = (int(each, 16) for each in found.groups())
    return trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(flags))


def is_unsampled(message: Message) -> bool:
    """Return True if the headers carry a context that is not sampled. This does not parse JSON."""
    fields = message._fields
    if len(fields) < 4 or b"headers" not in fields:
        return False
    at = fields.index(b"headers") + 1
    return at < len(fields) and _UNSAMPLED.search(fields[at]) is not None


def extract_context(message: Message) -> Context:
    """Return the context that the headers carry: the span of the send, and any baggage."""
    return propagate.extract(string_headers(message), Context())


def previous_run(message: Message) -> trace.SpanContext:
    """Return the span of the last failed run, which was stored in the retry or dead letter.

    If none was stored, the returned context is invalid.
    """
    if not has_field(message, LAST_RUN):
        return trace.INVALID_SPAN_CONTEXT
    return parse_traceparent(message.fields[LAST_RUN].decode("ascii", "replace"))
