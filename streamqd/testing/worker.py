"""A worker without a daemon, which runs one handler and returns the verdict on each message."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Self, Unpack

from streamqd import handlers
from streamqd.config import Daemon
from streamqd.dead_letter import DeadLetter
from streamqd.message import Delivery, Message
from streamqd.model import (
    Assignment,
    DeadAsked,
    DeadVerdict,
    Failed,
    ReleaseVerdict,
    RetryAsked,
    RetryVerdict,
)
from streamqd.policy import settlement
from streamqd.process import Exit
from streamqd.producer import Outgoing
from streamqd.producer.encoding import encode_fields
from streamqd.testing import crashes
from streamqd.testing.crashes import CrashAt
from streamqd.testing.declared import TestedOptions, handler_consumer, prepare_handler
from streamqd.testing.limits import check_thread, soft_limit
from streamqd.testing.result import Run
from streamqd.worker import dead_letters
from streamqd.worker.batches import batch_errors
from streamqd.worker.hooks import Hooks
from streamqd.worker.verdicts import RELEASE_SECONDS

INSTANCE, EPOCH = "test", 1
RUNS_MAX = 100


class Worker:
    """Runs a handler in the same way as a worker of the daemon. Use it in a `with` block.

    The other keyword arguments are options of `@handler`, and override those of the decorator. If
    the handler has several declarations, `topic` and `group` select one of them. If you pass a
    `state_dir`, the `on_start` and `on_stop` hooks of the handler's module run as well. Raises
    ConfigError or HandlerLoadError if the daemon could not start with this handler.
    """

    __module__ = "streamqd.testing"

    def __init__(
        self,
        handler: Callable[..., object],
        *,
        topic: str | None = None,
        group: str | None = None,
        partition: int = 0,
        state_dir: Path | None = None,
        **settings: Unpack[TestedOptions],
    ) -> None:
        self.handler = handler
        self.state_dir = state_dir
        self._consumer = handler_consumer(handler, topic, group, settings)
        self._reference = self._consumer.handler
        module = sys.modules.get(self._reference.partition(":")[0])
        self._loaded = prepare_handler(self._consumer, handler, module)
        assignment = Assignment(self._consumer.topic, partition, self._consumer.group)
        self._delivery = Delivery(assignment, INSTANCE, EPOCH)
        self._hooks: Hooks | None = None
        self._entries = 0
        self._now_unix_ms = int(time.time() * 1000)  # fixed; `run_to_end` adds delays to it

    def __enter__(self) -> Self:
        with crashes.intercept_exit(self.handler):
            self._hooks = self._start_hooks()
        return self

    def __exit__(self, *_: object) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is None:
            return
        if self.state_dir is not None:
            with crashes.intercept_exit(self.handler):
                hooks.stop()
        elif hooks.loop is not None:
            hooks.loop.close()

    # --- messages ---

    def message(
        self,
        payload: object,
        *,
        key: str | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        expires: float | timedelta | datetime | None = None,
        attempt: int = 1,
        age: float = 0.0,
    ) -> Message:
        """Return a message as a producer would send it. `payload` may be an Outgoing.

        `age` is the number of seconds since the message was first written, and `attempt` is the
        number of its next run, as if all earlier runs had failed. For an invalid message, the same
        errors are raised as by `Producer.send`.
        """
        if not isinstance(payload, Outgoing):
            payload = Outgoing(payload, key, headers, expires=expires)
        fields = encode_fields(payload, Daemon().max_message_bytes)
        made = Message(self._delivery, self._new_id(age), fields, retried=False)
        return made if attempt == 1 else self._requeue(made, attempt - 1, 0)

    # --- runs ---

    def run(self, message: Message, *, crashes: int = 0, crash_at: CrashAt | None = None) -> Run:
        """Run the handler once for a message from `Worker.message`, which may already have run.

        `crashes` is the number of earlier crashes that were counted against the message. If you
        pass `crash_at`, the handler runs in a child process that is killed at this step. A step is
        one executed line of the handler, counted from 0. "end" kills the child after the handler
        has finished. Raises ValueError if the handler has fewer steps.

        If a handler calls `os._exit` or `os.abort`, or sends a fatal signal to its own process,
        this counts as a crash, but the test process continues.
        """
        return self._run([message], crashes, crash_at, self._now)[0]

    def run_batch(self, messages: Sequence[Message]) -> list[Run]:
        """Run a handler of `list[Message]` once. Each message gets its own verdict.

        Raises TypeError if the handler takes a single message.
        """
        if not self._loaded.signature.batch:
            raise TypeError(f"{self._reference} takes one message, not list[Message]")
        return self._run(list(messages), 0, None, self._now)

    def run_to_end(
        self,
        message: Message,
        *,
        crash_at: CrashAt | None = None,
        duplicate: bool = False,
        jitter: float = 1.0,
        runs_max: int = RUNS_MAX,
    ) -> list[Run]:
        """Run the handler until the message is acknowledged or dead-lettered, without waiting.

        `crash_at` applies only to the first run. If `duplicate` is True, the message runs once more
        after it was acknowledged. `jitter` replaces the random part of each delay: 0 selects the
        shortest delay, and 1 the longest. Raises AssertionError if the message is neither
        acknowledged nor dead-lettered within `runs_max` runs.
        """
        story: list[Run] = []
        charged = 0
        now = self._now
        while len(story) < runs_max:
            run = self._run([message], charged, crash_at if not story else None, now)[0]
            story.append(run)
            if run.delay is None:
                if duplicate and run.verdict == "ack":
                    story += self._run([message], charged, None, now)
                return story
            low, high = run.delay
            now += low + (high - low) * jitter
            if run.verdict == "crash":
                charged += 1
            elif run.verdict == "retry" and run.in_place:
                message.failures_in_place += 1
            elif run.verdict == "retry":
                message, charged = self._requeue(message, run.attempt, run.crashes), 0
        raise AssertionError(
            f"{message.uid} is neither acknowledged nor dead-lettered after {runs_max} runs"
        )

    def _run(
        self, batch: list[Message], crashes: int, crash_at: CrashAt | None, now: float
    ) -> list[Run]:
        """Run the handler once, and decide on each message. `now` is the time in Unix seconds."""
        wanted = [each for each in batch if each.expires_at is None or now < each.expires_at]
        found = {each: self._make_run(each, "expired", crashes, now) for each in batch}
        charged = crashes + max(each.crash_count for each in batch)
        if crashes and settlement.before_run(charged, self._consumer.policy):
            return [self._run_of_crash(each, crashes, now) for each in batch]
        if crash_at is not None and wanted:
            if not self._run_and_kill(wanted, crash_at):
                raise ValueError(f"{self._reference} returns before it reaches step {crash_at}")
            return [self._run_of_crash(each, crashes + 1, now) for each in batch]
        errors = self._call(wanted) if wanted else []
        if isinstance(errors, Exit):
            return [self._run_of_crash(each, crashes + 1, now, errors) for each in batch]
        for message, error in zip(wanted, errors, strict=True):
            found[message] = self._decide(message, error, crashes, now)
        return [found[each] for each in batch]

    def _call(self, batch: list[Message]) -> list[BaseException | None] | Exit:
        """Return the error of each message (None for success), or the exit of a dead process."""
        hooks = self._hooks
        if hooks is None:
            raise RuntimeError("use a Worker in a `with` block")
        check_thread(self._consumer.timeout, hooks.interrupt)
        end: object
        with crashes.intercept_exit(self.handler) as death:
            try:
                with soft_limit(self._consumer.timeout, hooks.interrupt):
                    end = hooks.function(self._argument(batch))
            except KeyboardInterrupt:
                raise  # meant for the tests, and not for the handler
            except BaseException as raised:  # noqa: BLE001 - user code may raise anything
                end = raised
        if death.exit is not None:
            return death.exit
        if self._loaded.signature.batch:
            return batch_errors(end, batch)
        return [handlers.run_error(end)]

    def _argument(self, batch: list[Message]) -> Message | list[Message]:
        """Return the argument for the handler, which is the batch or its only message."""
        return batch if self._loaded.signature.batch else batch[0]

    def _run_and_kill(self, batch: list[Message], crash_at: CrashAt) -> bool:
        code = crashes.handler_code(self.handler)
        # The child process starts its own hooks and its own event loop.
        return crashes.run_and_kill(
            lambda: self._start_hooks().function(self._argument(batch)), code, crash_at
        )

    def _start_hooks(self) -> Hooks:
        hooks = Hooks(self._consumer, self._loaded, self._delivery.assignment)
        if self.state_dir is not None:
            hooks.start(handlers.Context(self._delivery.assignment, INSTANCE, self.state_dir))
        return hooks

    # --- verdicts ---

    def _decide(
        self, message: Message, error: BaseException | None, crashes: int, now: float
    ) -> Run:
        crashes += message.crash_count
        if error is None:
            return self._make_run(message, "ack", crashes, now)
        outcome = handlers.to_outcome(error, self._consumer.dlq_error)
        shortest, longest = (
            settlement.decide(
                outcome,
                attempt=message.attempt,
                crashes=crashes,
                age=max(0.0, now - message.timestamp),
                policy=self._consumer.policy,
                jitter=jitter,
                keyed=message.key is not None,
            )
            for jitter in (0.0, 1.0)
        )
        match shortest, longest:
            case RetryVerdict(low, kept), RetryVerdict(high):
                return self._make_run(
                    message, "retry", crashes, now, error=error, delay=(low, high), in_place=kept
                )
            case ReleaseVerdict(), _:
                wait = (RELEASE_SECONDS, RELEASE_SECONDS)
                return self._make_run(message, "release", crashes, now, error=error, delay=wait)
            case DeadVerdict(reason), _:
                assert isinstance(outcome, Failed | RetryAsked | DeadAsked)
                failure = outcome if isinstance(outcome, Failed) else outcome.failure
                failure = handlers.redact_failure(failure, self._loaded.redact)
                print_ = handlers.Description(error).fingerprint(self._reference)
                fields = dead_letters.build_fields(
                    message, self._delivery, self._reference, reason,
                    error_class=failure.error_class, error=failure.message,
                    traceback=failure.traceback,
                    attempts=message.attempt, crashes=crashes, fingerprint=print_,
                )  # fmt: skip
                return self._dead_run(message, reason, crashes, now, fields, error)
        raise AssertionError(f"no such verdict: {shortest}")

    def _run_of_crash(
        self, message: Message, charged: int, now: float, ending: Exit = crashes.KILLED
    ) -> Run:
        """Return the result of a crash, after which the message runs again or is dead-lettered.

        `charged` is the number of crashes counted against the message since it was last written.
        """
        crashes = message.crash_count + charged
        dead = settlement.before_run(crashes, self._consumer.policy)
        if dead is None:
            return self._make_run(message, "crash", crashes, now, delay=(0.0, 0.0))
        record = json.dumps(
            {"what": str(ending), "signal": ending.signal_name or None, "exitCode": ending.code}
        ).encode()
        what, context = dead_letters.crash_fields(record)
        why = (dead.reason, what, f"its worker process terminated with {what}")
        fields = dead_letters.build_fields_without_run(
            message, self._delivery, self._reference, why, crashes=crashes
        )
        return self._dead_run(message, dead.reason, crashes, now, fields | context, None)

    def _dead_run(
        self,
        message: Message,
        reason: str,
        crashes: int,
        now: float,
        fields: dict[bytes, bytes],
        error: BaseException | None,
    ) -> Run:
        fields = fields | {b"failedAt": str(int(now * 1000)).encode()}
        return self._make_run(
            *(message, "dead", crashes, now),
            reason=reason,
            error=error,
            dead_letter=DeadLetter.read(fields),
        )

    def _make_run(
        self, message: Message, verdict: Any, crashes: int, now: float, **more: Any
    ) -> Run:
        at = round(max(0.0, now - message.timestamp), 3)
        return Run(message, message.attempt, crashes, verdict, at=at, **more)

    def _requeue(self, message: Message, retries: int, crashes: int) -> Message:
        """Return the message as it would be stored in the retry stream."""
        carried = dead_letters.bookkeeping_fields(message, retries=retries, crashes=crashes)
        flat = [part for pair in (message.fields | carried).items() for part in pair]
        return Message(self._delivery, self._new_id(0.0), flat, retried=True)

    @property
    def _now(self) -> float:
        return self._now_unix_ms / 1000

    def _new_id(self, age: float) -> bytes:
        self._entries += 1
        return b"%d-%d" % (self._now_unix_ms - round(age * 1000), self._entries)
