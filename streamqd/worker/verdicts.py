"""How runs end: every message in hand becomes a verdict, whether its handler has run or not.

What is done is acknowledged, what has failed is set aside for a retry or becomes a dead letter, as
`policy.settlement` decides. `runs` has the other half: what leads to the end of a run.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from random import random
from typing import Any, TypeVar

from streamqd import handlers, logs
from streamqd.config import Consumer
from streamqd.message import Delivery, Message
from streamqd.model import (
    Ack,
    DeadAsked,
    Failed,
    KeepVerdict,
    Leave,
    Outcome,
    ReleaseAsked,
    RetryAsked,
    RetryVerdict,
)
from streamqd.policy import settlement
from streamqd.policy.fingerprint import fingerprint
from streamqd.scoreboard import DONE, FAILED, SETTLED, WorkerSlot, now_ns
from streamqd.store.client import Connection
from streamqd.worker import dead_letters
from streamqd.worker.control_channel import ControlChannel
from streamqd.worker.forks import family
from streamqd.worker.guards import Guards
from streamqd.worker.pending_entry import PendingEntry
from streamqd.worker.settler import Settlement, Settler, place_of

CLOCK_AGE_NS = 60_000_000_000  # how old the knowledge of the server's time may be
TOO_LARGE = "too-large"  # the reason of a letter
UNTOLD = "<its text took longer than the time limit of the run>"
TELL_TEXT = ("message", "traceback")  # the values of `dlq_error` that keep what an error says
Found = TypeVar("Found")


class Judged:
    """What is found out of a failed run, step by step: a time limit may end the search."""

    __slots__ = ("described", "error", "fingerprint", "outcome", "place", "text", "traceback")

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.outcome: Outcome | None = None  # without text and traceback
        self.described: handlers.Description | None = None
        # In words that may be kept.
        self.text = ""
        self.place = ""  # as shop.py:41, '' when it is not told
        self.traceback = ""
        self.fingerprint = ""


class Verdicts:
    """What a runner says of its messages, and the counters of its unit that follow from that."""

    def __init__(
        self,
        consumer: Consumer,
        delivery: Delivery,
        slot: WorkerSlot,
        gate: ControlChannel,
        settler: Settler,
    ) -> None:
        self.consumer = consumer
        self.delivery = delivery
        self.slot = slot
        self.gate = gate
        self.settler = settler
        self.policy = consumer.policy
        self.guards: Guards | None = None
        self.redact: Callable[[str], str] | None = None  # of texts that a letter keeps
        self.mark: Callable[[bytes], None] | None = None  # writes down which entry runs next
        self.bytes_max = sys.maxsize  # of a payload, and of key and headers
        # What a soft limit may interrupt: the handler, or what of its error is the user's code too.
        self._in_handler = False
        self._judging = False  # it is the latter, which runs in the main thread
        self.failed_runs = 0
        self.released = 0  # entries that were given back since somebody looked
        self._server_ahead_ns = 0  # the server's unix time less `now_ns`
        self._clock_read_ns = 0  # 0 = not read yet
        self._dead_lines = logs.Limit("message.dead", logging.WARNING)
        self._given_up_lines = logs.Limit("letter.given_up", logging.WARNING)
        self._retry_lines = logs.Limit("message.retry", logging.INFO)
        self._expired_lines = logs.Limit("message.expired", logging.INFO)

    # --- without a run ---

    def pass_over(self, index: int, message: Message, retried: bool, crashes: int) -> bool:
        """Acknowledge a message that has expired, without a run; False when it has not."""
        expires_at = message.expires_at
        if expires_at is None or self.server_time() < expires_at:
            return False
        self.slot.states[index] = DONE
        self.slot.add("expired")
        charged = crashes > 0 or message.failures_in_place > 0
        self.settler.ack(
            message.id_bytes, retried=retried, index=index, charged=charged, now=now_ns()
        )
        self._expired_lines.event(unit=self.delivery.unit, uid=message.uid, attempt=message.attempt)
        return True

    def settle_ghost(self, index: int, entry: PendingEntry) -> None:
        """Acknowledge an entry that somebody has trimmed away."""
        self.slot.add("ghosts")
        place = entry.place.decode()
        logs.event("message.ghost", logging.WARNING, unit=self.delivery.unit, place=place)
        self.slot.states[index] = DONE
        self.settler.ack(entry.id, retried=entry.retried, index=index, charged=True, now=now_ns())

    def bury_crasher(self, index: int, message: Message, entry: PendingEntry) -> bool:
        """Dead-letter a message that has killed its process too often, or is too large."""
        if self.bury_giant(index, message, entry.retried, entry.crashes):
            return True
        crashes = message.crash_count + entry.crashes
        verdict = settlement.before_run(crashes, self.policy) if entry.crashes else None
        if verdict is None:
            return False
        what, context = dead_letters.crash_fields(entry.context)
        if self.delivery.unit.reads_letters:
            self._give_up(index, message, entry.retried, True, verdict.reason, what)
            self.settler.flush()
            return True
        text = f"the process that handled it ended by {what}"
        self._bury(index, message, entry.retried, crashes, (verdict.reason, what, text), context)
        return True

    def bury_giant(self, index: int, message: Message, retried: bool, crashes: int) -> bool:
        """Dead-letter a message that is larger than any producer may send; False when it is not."""
        text = dead_letters.too_large(message, self.bytes_max)
        if not text or self.delivery.unit.reads_letters:
            return False
        crashes += message.crash_count
        self._bury(index, message, retried, crashes, (TOO_LARGE, TOO_LARGE, text), {})
        return True

    def _bury(
        self,
        index: int,
        message: Message,
        retried: bool,
        crashes: int,
        why: tuple[str, str, str],
        context: dict[bytes, bytes],
    ) -> None:
        """Dead-letter a message that is not handled. `why`: reason, the same shortly, as a text."""
        handler = self.consumer.handler
        fields = dead_letters.unhandled(message, self.delivery, handler, why, crashes=crashes)
        self._set_aside(index, message, retried, None, context | fields)
        self._say_end(self._dead_lines, message, why[0], why[1])
        self.settler.flush()
        if self.guards is not None and self.consumer.lanes == 1:
            self.guards.heed(more=self.slot.unfinished > 0)

    # --- the server's clock ---

    def read_clock(self, link: Connection) -> None:
        """Learn the server's time: it gave the messages their ids, and they may have an end."""
        seconds, micros = link.execute("TIME")
        self._clock_read_ns = now_ns()
        unix_ns = (int(seconds) * 1_000_000 + int(micros)) * 1000
        self._server_ahead_ns = unix_ns - self._clock_read_ns

    def clock_is_old(self, now: int) -> bool:
        """Whether `read_clock` should be called again."""
        return bool(self._clock_read_ns) and now - self._clock_read_ns > CLOCK_AGE_NS

    def server_time(self) -> float:
        """The server's unix time, as far as it is known here."""
        return (now_ns() + self._server_ahead_ns) / 1e9

    def _age(self, message: Message) -> float:
        # Both times are the server's: hosts need not agree on theirs.
        if self.policy.max_age is None:
            return 0.0
        # A letter begins anew when it is one: its message may be old.
        since = message.timestamp if message.letter is None else message.letter.failed_at
        return max(0.0, self.server_time() - since)

    # --- after a run that has failed ---

    def _judge(self, work: Callable[..., Found], *given: Any) -> Found | handlers.SoftTimeout:
        """Call what looks at the end of a run, by the user's code as a rule: limits go on.

        Returns the exception of the soft limit when that has come. What it interrupts must only
        find something out: nothing of ours may stay half done.
        """
        family.end_child()  # one that has raised, or returned something
        try:
            self._judging = self._in_handler = True
            try:
                return work(*given)
            finally:
                self._judging = self._in_handler = False
        except handlers.SoftTimeout as limit:
            self._judging = False
            return limit

    def _error_of(self, end: object) -> BaseException | None:
        """Return what is wrong with the end of a run, None when its message is done."""
        if issubclass(type(end), BaseException):  # `isinstance` may ask the user's code
            assert isinstance(end, BaseException)
            return end
        return self._judge(handlers.error_of, end)

    def _failed(
        self, index: int, message: Message, retried: bool, crashes: int, error: BaseException
    ) -> None:
        """Note the verdict on a run that has failed. `message` is as before the handler had it.

        Until then its state byte is RUNNING: what kills the process here is charged to it.
        """
        self.failed_runs += 1
        judged = Judged(error)
        self._judge(self._look, judged)
        outcome = judged.outcome or _untold(error, self.consumer.dlq_error)
        attempt = message.attempt
        free = self.guards is not None and self.guards.blameless(outcome, message)
        verdict = settlement.decide(
            outcome,
            attempt=attempt,
            crashes=crashes,
            age=self._age(message),
            policy=self.policy,
            jitter=random(),
            keyed=message.key is not None,
            blameless=free,
        )
        if isinstance(verdict, Leave):
            self.slot.add("released")
            self._leave(index, message, retried)
            return
        failure = _failure(outcome)
        told = _in_one(failure.error_class, judged.text)
        self.slot.add("failed")
        self.slot.failures.note(failure.error_class, now_ns())
        if failure.timed_out:
            self.slot.add("timeouts")
        fields = dead_letters.carried(message, retries=attempt - free, crashes=crashes)
        if isinstance(verdict, (RetryVerdict, KeepVerdict)):
            fields |= dead_letters.last_error(message, told, judged.place)
            if not self._retry_lines.held():
                self._say_retry(message, verdict.delay, told, judged)
            if isinstance(verdict, KeepVerdict):
                self._keep(index, message, retried, verdict.delay, 1 - free)
            else:
                self._set_aside(index, message, retried, verdict.delay, fields)
            return
        assert not isinstance(verdict, Ack)
        self._judge(self._look_closer, judged)
        if self.delivery.unit.reads_letters:
            charged = crashes > message.crash_count
            self._give_up(index, message, retried, charged, verdict.reason, told, judged)
            return
        handler = self.consumer.handler
        fields |= dead_letters.letter(
            message,
            self.delivery,
            handler,
            verdict.reason,
            replace(failure, message=judged.text, traceback=judged.traceback),
            attempts=attempt,
            crashes=crashes,
            fingerprint=judged.fingerprint or fingerprint(failure.error_class, "", handler),
        )
        self._set_aside(index, message, retried, None, fields)
        self._say_end(self._dead_lines, message, verdict.reason, told, judged)

    def _look(self, judged: Judged) -> None:
        """Find out all that decides, and what is told of every failure.

        As far as `dlq_error` and `redact_error` allow.
        """
        error, detail = judged.error, self.consumer.dlq_error
        judged.outcome = outcome = handlers.brief_of(error, detail)
        if type(outcome) is ReleaseAsked:
            return
        described = handlers.Description(error)
        if detail != "none":
            judged.place = described.place()
        if detail in TELL_TEXT:
            judged.text = UNTOLD  # until it is there
            judged.text = handlers.passed(described.text(), self.redact)
        judged.described = described

    def _look_closer(self, judged: Judged) -> None:
        """Find out what a letter tells beside that: the traceback and the fingerprint."""
        described = judged.described
        if described is None:
            return  # the time was over
        judged.fingerprint = described.fingerprint(self.consumer.handler)
        if judged.text == handlers.TOO_SLOW:
            judged.traceback = judged.text  # nor would it end here
        elif self.consumer.dlq_error == "traceback":
            judged.traceback = handlers.passed(described.traceback(), self.redact)

    def _leave(self, index: int, _message: Message, _retried: bool) -> None:
        """Give an entry back: it stays pending, and the next listing brings it back."""
        self.slot.states[index] = SETTLED
        self.released += 1

    def _keep(self, index: int, message: Message, retried: bool, delay: float, spent: int) -> None:
        """Keep an entry in hand for its next run, in `delay` seconds; `spent` attempts are gone."""
        raise NotImplementedError(f"on_error of {self.consumer.name} keeps no message")

    def places(self) -> Iterable[bytes]:
        """The places of what stays in hand when the connection is lost."""
        return ()

    def _set_aside(
        self,
        index: int,
        message: Message,
        retried: bool,
        delay: float | None,
        fields: dict[bytes, bytes],
    ) -> None:
        if delay is None:
            fields |= dead_letters.withheld(message, self.consumer.dlq_body)
            if self.guards is not None:
                self.guards.died()
        place = place_of(message.id_bytes, retried=retried)
        item = Settlement(place, index, delay, fields, message._fields, self.settler.read)
        self.slot.states[index] = FAILED  # the verdict is found: nobody is to blame any more
        self.settler.set_aside(item, now_ns())

    def _give_up(
        self,
        index: int,
        message: Message,
        retried: bool,
        charged: bool,
        reason: str,
        error: str,
        judged: Judged | None = None,
    ) -> None:
        """Acknowledge a dead letter: as a letter again it would come back for ever. It is kept."""
        self.slot.states[index] = DONE
        self.slot.add("given_up")
        self.settler.ack(
            message.id_bytes, retried=retried, index=index, charged=charged, now=now_ns()
        )
        self._say_end(self._given_up_lines, message, reason, error, judged)

    def _catch_up(self) -> None:
        """Say how many lines were left out, when it is time to."""
        for lines in (
            self._dead_lines,
            self._given_up_lines,
            self._retry_lines,
            self._expired_lines,
        ):
            lines.catch_up(unit=self.delivery.unit)

    def _say_retry(self, message: Message, delay: float, error: str, judged: Judged) -> None:
        if logs.verbose():
            self._judge(self._look_closer, judged)
        self._retry_lines.event(
            trace=judged.traceback,
            unit=self.delivery.unit,
            uid=message.uid,
            attempt=message.attempt,
            delay=round(delay, 3),
            error=error,
            at=judged.place or None,
        )

    def _say_end(
        self,
        lines: logs.Limit,
        message: Message,
        reason: str,
        error: str,
        judged: Judged | None = None,
    ) -> None:
        """Log what a message has died of; `judged` when that was a run."""
        if not lines.held():
            lines.event(
                trace=judged.traceback if judged and logs.verbose() else "",
                unit=self.delivery.unit,
                uid=message.uid,
                attempt=message.attempt,
                reason=reason,
                error=error,
                at=(judged.place if judged else "") or None,
            )


def _untold(error: BaseException, detail: str) -> Failed:
    """What is known of an error at which nobody can look within the time limit."""
    name = type(error).__name__
    return Failed("" if detail == "none" else name, "", "", (name,))


def _in_one(name: str, text: str) -> str:
    """Class and text in one: `ValueError: the card was declined`."""
    return f"{name}: {text}" if name and text else name or text


def _failure(outcome: Outcome) -> Failed:
    if isinstance(outcome, Failed):
        return outcome
    assert isinstance(outcome, RetryAsked | DeadAsked)
    return outcome.failure
