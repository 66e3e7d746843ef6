"""Decide what happens to messages that have failed or cannot run.

`policy.settlement` makes the decision, which is the verdict. This module collects the facts for it,
and passes the verdict to the settler as an acknowledgment, a retry or a dead letter. A message that
runs again in its place stays in the executor, and its due time and failure count are written to
Redis for the next owner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from random import random

from streamqd import handlers, logs
from streamqd.message import Message
from streamqd.model import (
    DeadAsked,
    Failed,
    Outcome,
    ReleaseAsked,
    ReleaseVerdict,
    RetryAsked,
    RetryVerdict,
)
from streamqd.policy import settlement
from streamqd.policy.fingerprint import fingerprint
from streamqd.scoreboard import CLEARED, RUNNING, now_ns
from streamqd.store.messages import PendingEntry
from streamqd.telemetry import FailedRun, RunTelemetry
from streamqd.worker import dead_letters
from streamqd.worker.context import WorkerContext
from streamqd.worker.entry import NOWHERE, FetchedEntry
from streamqd.worker.guards import Guards
from streamqd.worker.settler import FailedEntry

RELEASE_SECONDS = 1.0  # time until a message runs again after its handler has raised Release
TOO_LARGE = "too-large"  # reason code of a dead letter
TEXT_TIMED_OUT = "<its text took longer than the time limit of the run>"
# The values of `dlq_error` that store the text of the exception.
KEEPS_TEXT = ("message", "traceback")


class FailureDetails:
    """The facts about a failed run, which are collected one by one.

    If collecting them takes too long, those that were found so far are used.
    """

    __slots__ = (
        *("described", "error", "fingerprint", "outcome", "place", "span", "text", "traceback"),
    )

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.outcome: Outcome | None = None  # the kind of failure, without text or traceback
        self.described: handlers.Description | None = None
        # The texts below may be stored in Redis.
        self.text = ""
        self.place = ""  # place of the error, such as shop.py:41, or '' if it is unknown
        self.traceback = ""
        self.fingerprint = ""
        self.span = ""  # span of the run as a traceparent, or '' if the run has none


class Verdicts:
    """Finds the verdicts on messages that have failed or cannot run, and counts them."""

    def __init__(
        self,
        context: WorkerContext,
        guards: Guards | None,
        redact: Callable[[str], str] | None,
        observer: RunTelemetry | None = None,
    ) -> None:
        """Create the verdicts of one worker.

        `redact` is the user's function that filters texts before they are logged or stored in
        Redis. `observer` reports failed runs to tracing and error trackers.
        """
        self._observer = observer
        self._context = context
        self._consumer = context.consumer
        self._delivery = context.delivery
        self._slot = context.slot
        self._settler = context.settler
        self._counts = context.counts
        self._clock = context.clock
        self._run_bounded = context.limit.run_bounded
        self._policy = context.consumer.policy
        self._guards = guards
        self._redact = redact
        self._bytes_max = context.settings.daemon.max_message_bytes
        self.released = 0  # number of released entries that have not been listed again yet
        self._dead_lines = logs.Limit("message.dead_lettered", logging.WARNING)
        self._given_up_lines = logs.Limit("dead_letter.given_up", logging.WARNING)
        self._retry_lines = logs.Limit("message.retried", logging.INFO)
        self._expired_lines = logs.Limit("message.expired", logging.INFO)

    # --- without a run ---

    def skip_expired(self, entry: FetchedEntry) -> bool:
        """If a message has expired, acknowledge it without a run and return True."""
        message = entry.message
        expires_at = message.expires_at
        if expires_at is None or self._clock.time() < expires_at:
            return False
        self._slot.add("expired")
        self._settler.skip(entry)
        self._expired_lines.event(
            assignment=self._delivery.assignment, uid=message.uid, attempt=message.attempt
        )
        return True

    def acknowledge_missing(self, entry: PendingEntry) -> None:
        """Acknowledge a pending entry whose message was trimmed from its stream."""
        self._slot.add("missing_entries")
        place = entry.place.decode()
        logs.event(
            "missing_entry.acknowledged",
            logging.WARNING,
            assignment=self._delivery.assignment,
            place=place,
        )
        self._settler.ack(entry.id, NOWHERE, now_ns(), entry.retried, has_counters=True)

    def dead_letter_unrunnable(self, entry: FetchedEntry, context: bytes) -> bool:
        """If a message is too large or has crashed too often, dead-letter it and return True.

        `context` is the JSON in which the supervisor has recorded the last crash.
        """
        if self.dead_letter_oversized(entry):
            return True
        verdict = settlement.before_run(entry.crash_count, self._policy) if entry.crashes else None
        if verdict is None:
            return False
        what, fields = dead_letters.crash_fields(context)
        if self._delivery.assignment.reads_dead_letters:
            self._give_up(entry, verdict.reason, what)
            self._settler.flush()
            return True
        text = f"its worker process terminated with {what}"
        self._dead_letter(entry, (verdict.reason, what, text), fields)
        return True

    def dead_letter_oversized(self, entry: FetchedEntry) -> bool:
        """If a message is larger than producers may write, dead-letter it and return True."""
        text = dead_letters.find_oversize(entry.message, self._bytes_max)
        if not text or self._delivery.assignment.reads_dead_letters:
            return False
        self._dead_letter(entry, (TOO_LARGE, TOO_LARGE, text), {})
        return True

    def _dead_letter(
        self, entry: FetchedEntry, why: tuple[str, str, str], context: dict[bytes, bytes]
    ) -> None:
        """Dead-letter a message without a run.

        `why` contains the reason code, the text from which the fingerprint is computed, and a
        sentence for people. `context` holds additional fields of the dead letter.
        """
        message, handler = entry.message, self._consumer.handler
        fields = dead_letters.build_fields_without_run(
            message, self._delivery, handler, why, crashes=entry.crash_count
        )
        self._fail(entry, None, context | fields)
        self._log_dead_letter(self._dead_lines, message, why[0], why[1])
        self._settler.flush()
        if self._guards is not None and self._guards.must_pause and self._consumer.lanes == 1:
            self._guards.pause_partition()

    # --- after a failed run ---

    def run_error(self, end: object) -> BaseException | None:
        """Return the error of a finished run, or None if its message was handled.

        `end` is the handler's return value or its exception.
        """
        if issubclass(type(end), BaseException):  # `isinstance` can call user code
            assert isinstance(end, BaseException)
            return end
        return self._run_bounded(handlers.run_error, end)

    def settle_failure(self, entry: FetchedEntry, error: BaseException) -> bool:
        """Find the verdict on a failed run. Return True if the message waits in its place.

        Otherwise, pass the verdict to the settler. Call `entry.restore()` first. Until the verdict
        is found, the state byte of the entry is RUNNING, so that a crash is charged to it. Such a
        crash is possible, because the inspection of the error may run user code.
        """
        self._slot.states[entry.index] = RUNNING
        message, crashes = entry.message, entry.crash_count
        self._counts.failed += 1
        details = FailureDetails(error)
        self._run_bounded(self._inspect, details)
        outcome = details.outcome or _failure_without_text(error, self._consumer.dlq_error)
        attempt = message.attempt
        free = self._guards is not None and self._guards.exempts(outcome, message)
        verdict = settlement.decide(
            outcome,
            attempt=attempt,
            crashes=crashes,
            age=self._age(message),
            policy=self._policy,
            jitter=random(),
            keyed=message.key is not None,
            exempt=free,
        )
        if isinstance(verdict, ReleaseVerdict):
            self._observe(entry, details, outcome, "release", stays=True)
            self._release(entry, in_place=verdict.in_place)
            return verdict.in_place
        failure = _failure(outcome)
        text = _error_text(failure.error_class, details.text)
        self._slot.add("failed")
        self._slot.failures.note(failure.error_class, now_ns())
        if failure.timed_out:
            self._slot.add("timeouts")
        fields = dead_letters.bookkeeping_fields(message, retries=attempt - free, crashes=crashes)
        if isinstance(verdict, RetryVerdict):
            self._observe(entry, details, outcome, "retry", stays=verdict.in_place)
            fields |= dead_letters.last_error(message, text, details.place)
            fields |= dead_letters.last_run(message, details.span)
            if not self._retry_lines.is_suppressed():
                self._log_retry(message, verdict.delay, text, details)
            if verdict.in_place:
                self._keep_in_place(entry, verdict.delay, 1 - free)
            else:
                self._fail(entry, verdict.delay, fields)
            return verdict.in_place
        self._run_bounded(self._inspect_fully, details)
        self._observe(entry, details, outcome, "dead")
        if self._delivery.assignment.reads_dead_letters:
            self._give_up(entry, verdict.reason, text, details)
            return False
        fields |= dead_letters.last_run(message, details.span)
        handler = self._consumer.handler
        fields |= dead_letters.build_fields(
            message,
            self._delivery,
            handler,
            verdict.reason,
            error_class=failure.error_class,
            error=details.text,
            traceback=details.traceback,
            attempts=attempt,
            crashes=crashes,
            fingerprint=details.fingerprint or fingerprint(failure.error_class, "", handler),
        )
        self._fail(entry, None, fields)
        self._log_dead_letter(self._dead_lines, message, verdict.reason, text, details)
        return False

    def _release(self, entry: FetchedEntry, *, in_place: bool) -> None:
        self._slot.add("released")
        if in_place:
            self._keep_in_place(entry, RELEASE_SECONDS, 0)
        else:
            self._slot.states[entry.index] = CLEARED
            self.released += 1

    def _observe(
        self,
        entry: FetchedEntry,
        details: FailureDetails,
        outcome: Outcome,
        verdict: str,
        *,
        stays: bool = False,
    ) -> None:
        """Pass a failed run to the observer, if there is one, and store the trace span of the run.

        `stays` is true if the message keeps its place in its stream.
        """
        observer = self._observer
        if observer is None:
            return
        failed = isinstance(outcome, Failed)
        if observer.reports_errors and failed and not details.fingerprint:
            self._run_bounded(self._inspect_fully, details)
        run = FailedRun(
            entry.place,
            entry.message,
            verdict,
            stays,
            details.error,
            not failed,
            "" if isinstance(outcome, ReleaseAsked) else _failure(outcome).error_class,
            details.text,
            details.traceback,
            details.fingerprint,
        )
        if observer.reports_errors:
            self._run_bounded(observer.report, run)
        details.span = observer.note_failure(run)

    def _inspect(self, details: FailureDetails) -> None:
        """Collect the facts for the verdict and the log, as far as `dlq_error` allows.

        The text is filtered with the user's `redact_error`.
        """
        error, detail = details.error, self._consumer.dlq_error
        details.outcome = outcome = handlers.to_brief_outcome(error, detail)
        if type(outcome) is ReleaseAsked:
            return
        described = handlers.Description(error)
        if detail != "none":
            details.place = described.place()
        if detail in KEEPS_TEXT:
            details.text = TEXT_TIMED_OUT  # stays only if the next line takes too long
            details.text = handlers.redact_text(described.text(), self._redact)
        details.described = described

    def _inspect_fully(self, details: FailureDetails) -> None:
        """Also collect the fingerprint and the traceback, which only some verdicts or logs need."""
        described = details.described
        if described is None:
            return  # `_inspect` timed out
        details.fingerprint = described.fingerprint(self._consumer.handler)
        if details.text == handlers.TOO_SLOW:
            details.traceback = details.text  # formatting the traceback would time out too
        elif self._consumer.dlq_error == "traceback":
            details.traceback = handlers.redact_text(described.traceback(), self._redact)

    def _keep_in_place(self, entry: FetchedEntry, delay: float, attempts: int) -> None:
        """Make a message wait in its place, and record its failure count for the next owner."""
        now = now_ns()
        entry.keep(attempts, now + int(delay * 1e9))
        if attempts:
            failures = entry.message.failures_in_place
            self._settler.note(entry.place, failures, entry.due_ns, now)

    def _age(self, message: Message) -> float:
        # Compare times of the server's clock only, because the clocks of two hosts can differ.
        if self._policy.max_age is None:
            return 0.0
        # The age of a dead letter counts from its failure, because the original message may be much
        # older.
        since = message.timestamp if message.dead_letter is None else message.dead_letter.failed_at
        return max(0.0, self._clock.time() - since)

    def _fail(self, entry: FetchedEntry, delay: float | None, fields: dict[bytes, bytes]) -> None:
        message = entry.message
        if delay is None:
            fields |= dead_letters.replacement_fields(message, self._consumer.dlq_body)
            if self._guards is not None:
                self._guards.count_dead_letter()
        body, number = message._fields, self._settler.number(entry.index)
        item = FailedEntry(entry.place, entry.index, delay, fields, body, entry.size, number)
        self._settler.fail(item, now_ns())

    def _give_up(
        self, entry: FetchedEntry, reason: str, error: str, details: FailureDetails | None = None
    ) -> None:
        """Acknowledge an entry of a dead-letter stream that would otherwise be dead-lettered.

        If it were dead-lettered, the consumer that reads the dead letters would read it again.
        """
        self._slot.add("given_up")
        self._settler.skip(entry)
        self._log_dead_letter(self._given_up_lines, entry.message, reason, error, details)

    def catch_up(self) -> None:
        """Log how many log lines were suppressed, once per interval and kind of line."""
        for lines in (
            self._dead_lines,
            self._given_up_lines,
            self._retry_lines,
            self._expired_lines,
        ):
            lines.catch_up(assignment=self._delivery.assignment)

    def _log_retry(
        self, message: Message, delay: float, error: str, details: FailureDetails
    ) -> None:
        if logs.verbose():
            self._run_bounded(self._inspect_fully, details)
        self._retry_lines.event(
            trace=details.traceback,
            assignment=self._delivery.assignment,
            uid=message.uid,
            attempt=message.attempt,
            delay=round(delay, 3),
            error=error,
            at=details.place or None,
            **_trace_fields(details.span),
        )

    def _log_dead_letter(
        self,
        lines: logs.Limit,
        message: Message,
        reason: str,
        error: str,
        details: FailureDetails | None = None,
    ) -> None:
        """Log why a message was dead-lettered or given up. `details` is None if it did not run."""
        if not lines.is_suppressed():
            lines.event(
                trace=details.traceback if details and logs.verbose() else "",
                assignment=self._delivery.assignment,
                uid=message.uid,
                attempt=message.attempt,
                reason=reason,
                error=error,
                at=(details.place if details else "") or None,
                **_trace_fields(details.span if details else ""),
            )


def _trace_fields(span: str) -> dict[str, str]:
    """Return the log fields for a trace span, given as a traceparent, or {} for ''."""
    if not span:
        return {}
    _, trace_id, span_id, _ = span.split("-")
    return {"trace_id": trace_id, "span_id": span_id}


def _failure_without_text(error: BaseException, detail: str) -> Failed:
    """Return the outcome of an error whose inspection took too long, with only the error's class.

    `detail` is the value of the setting `dlq_error`.
    """
    name = type(error).__name__
    return Failed("" if detail == "none" else name, "", "", (name,))


def _error_text(name: str, text: str) -> str:
    """Return an error's class and text as one string, such as "ValueError: card declined"."""
    return f"{name}: {text}" if name and text else name or text


def _failure(outcome: Outcome) -> Failed:
    if isinstance(outcome, Failed):
        return outcome
    assert isinstance(outcome, RetryAsked | DeadAsked)
    return outcome.failure
