"""The state of one assignment in the supervisor: its lease, its process and its next step.

This is a state machine that does no I/O. `intent` returns the next call to Redis, and `apply_reply`
processes the reply. `startable` is true if a worker may be forked, and `on_exit` processes the exit
of the worker's process. Each call is repeated with the same arguments until Redis replies, so a
lost reply does no harm. If the supervisor dies before the reply to a refence arrives, its successor
repeats the refence, and only the recorded cause of the crash is lost.

    FREE ── acquire ──► ACQUIRING ── OK ──► HELD ── process exits ──► REFENCING ── OK ──► HELD
                         │                │                                │ (new token)
                         └── release ─────┴── release, or it was leaving ──┘
                                          ▼
                                      RELEASING ── answered ──► FREE

A *refence* replaces the token in the fence, so that Redis rejects any write of the exited process.
It also acknowledges finished messages and may charge one, which means that a crash is counted
against the message. So the assignment stays in REFENCING until Redis replies. If a leaving worker
has left no message to acknowledge or charge, HELD leads directly to RELEASING. A refused acquire or
a lost lease leads to FREE. An assignment of a killed supervisor (`resume`) starts in REFENCING, or
reaches it through ACQUIRING.
"""

from __future__ import annotations

import enum
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import random
from typing import ClassVar, NamedTuple

from streamqd.config import Consumer, Daemon
from streamqd.errors import RedisResponseError, RefusalKind, refusal_kind_for_code
from streamqd.model import ENTRIES_MAX, Assignment, Lease
from streamqd.policy import restart, rounds
from streamqd.process import Child, Exit
from streamqd.scoreboard import Batch, WorkerSlot, WorkerState, now_ns
from streamqd.store import leases
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply
from streamqd.supervisor.running_worker import Kill, RunningWorker
from streamqd.supervisor.scoreboard_file import ResumableAssignment
from streamqd.worker import ExitCode

# Time limit for `on_stop` and the exit of a worker that handles no more messages.
ON_STOP_SECONDS = 30.0


class Phase(enum.Enum):
    """The step that an assignment has reached, without the arguments of the step's call."""

    FREE = "free"
    ACQUIRING = "acquiring"
    HELD = "held"
    REFENCING = "refencing"  # the values appear in the log
    RELEASING = "releasing"


class Blame(NamedTuple):
    """The assessment of why a process has exited, and which messages may have caused it.

    If there is exactly one suspect, it is charged, so the crash is counted against that message.
    The other values depend on the kind of exit:

    | Exit                            | `expected` | `crashed` | `suspects`                  |
    | planned                         | yes        | no        | none                        |
    | killed: hard limit              | yes        | yes       | messages of the killed run  |
    | killed: boot time, stalled      | yes        | yes       | none                        |
    | killed for another reason       | yes        | no        | none                        |
    | any other                       | no         | yes       | messages that were running  |
    """

    expected: bool
    crashed: bool
    suspects: list[bytes]
    charged: bytes | None


class ExitAssessment(NamedTuple):
    """The consequences of the exit of a process."""

    crashed: bool
    cause: restart.ExitCause
    charged: bytes | None
    lived: float = 0.0  # number of seconds for which the process was ready
    settled: int = 0  # number of messages that it finished, successfully or not
    lost: bool = False  # True if it was the first to notice that the lease has another owner
    # True if the process crashed before it finished a message, and this only makes the rounds of
    # the known suspects smaller (see `policy.rounds`).
    narrowed: bool = False


@dataclass(frozen=True, slots=True)
class Free:
    """This instance neither owns the assignment nor tries to acquire it."""

    phase: ClassVar[Phase] = Phase.FREE


@dataclass(frozen=True, slots=True)
class Acquiring:
    """This instance is acquiring the lease. `dead_token` belongs to an owner that has exited."""

    phase: ClassVar[Phase] = Phase.ACQUIRING

    dead_token: str = ""
    resumed: ResumableAssignment | None = None  # state that a killed supervisor left


@dataclass(frozen=True, slots=True)
class HeldLease:
    """This instance owns the assignment, and a worker may run."""

    phase: ClassVar[Phase] = Phase.HELD


@dataclass(frozen=True, slots=True)
class Refencing:
    """This instance is replacing its token after its worker has exited.

    The refence also acknowledges the messages in `done` and charges the message in `charged`.
    """

    phase: ClassVar[Phase] = Phase.REFENCING

    new_token: str
    done: Sequence[bytes] = ()
    charged: bytes | None = None
    context: bytes = b""  # JSON that describes how the charged message's process exited
    release_after: bool = False  # True if the lease is to be released after the reply
    resumed: ResumableAssignment | None = None  # state that a killed supervisor left


@dataclass(frozen=True, slots=True)
class Releasing:
    """This instance is releasing the lease. No process still uses its token."""

    phase: ClassVar[Phase] = Phase.RELEASING


# The step of an assignment, with the arguments of the call that completes it. An acquire or refence
# is repeated with the same arguments until Redis replies.
OwnershipStep = Free | Acquiring | HeldLease | Refencing | Releasing


@dataclass
class AssignmentState:
    """The supervisor's state of one assignment, from the first offer until the daemon exits."""

    assignment: Assignment
    consumer: Consumer
    slot: WorkerSlot
    step: OwnershipStep = Free()
    since: float = 0.0  # monotonic time at which this instance acquired the lease
    renew_at: float = 0.0
    worker: RunningWorker | None = None
    standby: Child | None = None  # successor of the worker, which is booting or has booted
    groups_ready: bool = False
    start_at: float = 0.0  # earliest monotonic time of the next fork
    refused_since: float = 0.0  # monotonic time since which forks are refused, 0 if they are not
    # Messages that may have crashed a process. The next process runs them in rounds.
    suspects: rounds.Suspects = field(default_factory=dict)
    # True if `suspects` contains every message that was running when the last owner exited.
    suspects_complete: bool = False
    uncharged: int = 0  # number of consecutive processes that crashed while no message ran
    exits: list[restart.WorkerExit] = field(default_factory=list)
    broken_until: float = 0.0
    last_exit: str = ""
    refusal: str = ""  # code of the last error reply, kept so that repetitions are not logged
    refused: str = ""  # phase of the refused call, or `group`
    relayed: tuple[int, int] = (0, 0)  # `housekeeping` at the time when the worker was last woken
    pace: float = 0.0  # messages per second that an earlier process finished
    leaving: str = ""  # reason for the next release, which the release records in Redis

    def __post_init__(self) -> None:
        # Until the lease is acquired, its epoch is the last one that was seen in Redis.
        self.lease = Lease(self.assignment, "")

    # --- intents ---

    def resume(self, found: ResumableAssignment, *, alone: bool) -> None:
        """Plan to take over the lease of a killed supervisor, as if only its worker had crashed.

        The token is replaced, which Redis refuses if another instance has owned the assignment in
        the meantime. Finished messages are acknowledged. `alone` is true if no messages were
        running in other assignments. If it is false, any of the running messages may have killed
        the supervisor, so this charges none of them. Instead, the next worker runs them in marked
        rounds to find out, as after the loss of a host. Messages that had not started are not
        suspects.
        """
        assert isinstance(self.step, Free)
        if not (alone or found.next_token):
            self.slot.restore(found.done, found.running)
            self.slot.note_lease(found.lease)
            self.acquire(found.lease.epoch, found.lease.token, found)
            self._add_suspects(found.running)
            self.suspects_complete = True
            return
        self.lease = found.lease
        new_token = found.next_token or secrets.token_hex(16)
        self.step = Refencing(new_token, found.done, resumed=found)
        if len(found.running) == 1:
            # If a refence was in progress, the worker had exited before the supervisor did, and its
            # reason is unknown.
            what = {} if found.next_token else {"what": "the death of its supervisor"}
            context = json.dumps(what).encode()
            self.step = replace(self.step, charged=found.running[0], context=context)
        else:
            self._add_suspects(found.running)
        self.slot.restore(found.done, found.running)
        self.slot.note_lease(self.lease, new_token)

    def acquire(
        self, seen_epoch: int, dead_token: str = "", resumed: ResumableAssignment | None = None
    ) -> None:
        """Plan to acquire the lease. Redis refuses this if its epoch is no longer `seen_epoch`.

        `dead_token` is the token of an owner that has exited, or ''. `resumed` is the state that a
        killed supervisor left.
        """
        assert isinstance(self.step, Free)
        self.step, self.leaving = Acquiring(dead_token, resumed), ""
        self.lease = Lease(self.assignment, secrets.token_hex(16), seen_epoch)
        self.suspects_complete = False

    def release(self, reason: str = "") -> None:
        """Plan to release the lease. The process must have exited."""
        assert self.worker is None
        self.refused_since, self.leaving = 0.0, reason
        match self.step:
            case Refencing() as refence:
                self.step = replace(refence, release_after=True)
            case HeldLease():
                self._release()
            case Acquiring():
                # The call that acquires the lease may or may not have been executed. Releasing the
                # token of that call is correct in both cases.
                self.step = Releasing()

    def _release(self) -> None:
        self.step = Releasing()
        self.slot.forget_lease()  # all messages are finished, so a successor has nothing to resume

    def intent(self, keys: Keys, ttl: float, owner: str) -> Call | None:
        """Return the call to send to Redis now, or None. It stays the same until Redis replies."""
        match self.step:
            case Acquiring(dead_token):
                return leases.acquire(keys, self.lease, ttl, owner, dead_token)
            case Refencing(token, done, charged, context):
                return leases.refence(keys, self.lease, token, ttl, charged, context, done)
            case Releasing():
                return leases.release(keys, self.lease, self.leaving)
        return None

    # --- answers ---

    def apply_reply(self, reply: Reply | RedisResponseError, now: float) -> str:
        """Process the reply to the call from `intent`, and move on to the next step.

        Return acquired, released, charged, resumed or lost, so that the caller can log the change,
        or '' if there is nothing to log.
        """
        if isinstance(reply, RedisResponseError):
            # Redis has changed nothing, and the next round trip repeats the call.
            return ""
        match self.step:
            case Acquiring() as acquisition:
                return self._apply_acquire_reply(acquisition, reply, now)
            case Refencing() as refence:
                return self._apply_refence_reply(refence, reply, now)
            case Releasing():
                self.become_free()
                return "released"
        return ""

    def _apply_acquire_reply(self, acquisition: Acquiring, reply: Reply, now: float) -> str:
        if reply.word not in ("OK", "MINE"):
            self.step = Free()
            self._drop_token()
            return ""
        epoch = leases.parse_epoch(reply)  # parsed before any change, because it may raise
        self.step = HeldLease()
        self.lease = self.lease._replace(epoch=epoch)
        resumed = acquisition.resumed
        if resumed is not None:
            new_token = secrets.token_hex(16)
            self.step = Refencing(new_token, resumed.done, resumed=resumed)
            # The acquire has already charged or accused the running messages that were marked, so
            # the refence must not charge them again.
            self.slot.restore(resumed.done, [])
            self.slot.note_lease(self.lease, new_token)
            return "acquired"
        self.slot.forget_batch()  # this batch belongs to an earlier process
        self.slot.note_lease(self.lease)
        self._start_ownership(now)
        return "acquired"

    def _start_ownership(self, now: float) -> None:
        self.since = now
        self.groups_ready = False
        self.refused_since = 0.0
        self.slot.since_unix_ms = int(time.time() * 1000)
        self.slot.owned = 1
        if self.slot.state == WorkerState.GONE:
            self.slot.state = WorkerState.BOOTING  # its process is forked next

    def _apply_refence_reply(self, refence: Refencing, reply: Reply, now: float) -> str:
        epoch = leases.parse_epoch(reply) if reply.word == "OK" else 0
        # Clear the batch before the new token is recorded. Otherwise, if the supervisor were killed
        # in between, its successor would charge the batch again under the new token.
        self.slot.forget_batch()
        if reply.word != "OK":
            self.become_free()
            return "lost"
        self.lease = Lease(self.assignment, refence.new_token, epoch)
        if refence.release_after:
            self.slot.forget_lease()
        else:
            self.slot.note_lease(self.lease)
        charged = "charged" if refence.charged is not None else ""
        if refence.resumed is not None:
            self._start_ownership(now)
            charged = "resumed"
        if refence.charged is not None:
            self.slot.add("charged")
        self.slot.add("acked", len(refence.done))
        self.step = Releasing() if refence.release_after else HeldLease()
        return charged

    def become_free(self) -> None:
        """Record that this instance no longer owns the assignment."""
        self.step = Free()
        self._drop_token()
        self.slot.forget_lease()
        self.slot.owned = 0
        self.slot.trusted_until_ns = 0

    def _drop_token(self) -> None:
        self.lease = self.lease._replace(token="")

    # --- the process ---

    def on_exit(self, exit_: Exit) -> ExitAssessment:
        """Process the exit of the worker: find its cause, and plan the next call to Redis."""
        worker, now = self.worker, time.monotonic()
        assert worker is not None
        # Read the slot first, and clear it last, because the refence needs its entries.
        lived, settled = worker.seconds_ready(now), worker.count_settled()
        batch, held = self.slot.batch(), isinstance(self.step, HeldLease)
        blame = self._blame(exit_, worker.kill, batch)
        if not held:
            # Another owner handles the pending messages, and this token cannot charge any.
            blame = blame._replace(suspects=[], charged=None)
        narrowed = blame.crashed and not settled and rounds.narrows(self.suspects, blame.suspects)
        self._note_blame(blame, idle=not batch.running and exit_.code != ExitCode.BOOT_FAILED)
        refence = Refencing(secrets.token_hex(16), batch.done, blame.charged)
        if blame.charged is not None:
            refence = replace(refence, context=_crash_context(exit_, worker))
        if blame.crashed:
            self._count_crash(exit_, worker.kill)
        if worker.stop_reason == "recycle" and not worker.has_recycled:
            self.slot.add("recycled")
        self._plan_next_call(exit_, worker, refence, expected=blame.expected)
        lost = held and isinstance(self.step, Free)
        self.pace = self.message_rate(now)
        self.worker = None
        self._clear_slot(blame.suspects)
        cause = restart.ExitCause.ORDERED
        if blame.crashed and batch.running:
            cause = restart.ExitCause.HANDLING
        elif blame.crashed:
            cause = restart.ExitCause.IDLE if worker.ready_at else restart.ExitCause.BOOT
        return ExitAssessment(blame.crashed, cause, blame.charged, lived, settled, lost, narrowed)

    def _blame(self, exit_: Exit, kill: Kill | None, batch: Batch) -> Blame:
        """Find out if an exit was expected, and which messages may have caused it.

        `kill` is the SIGKILL that the supervisor has sent to the process, or None.
        """
        # The exit code alone proves nothing, because a handler can exit with any code. But a worker
        # that exits as planned reports that it is quiet before it exits.
        quiet = self.slot.state == WorkerState.QUIET and not batch.running
        unexpected = kill is None and not (quiet and exit_.code in ORDERLY)
        suspects = batch.running if unexpected else []
        if kill is not None and kill.reason == "hard-limit":
            # Only the messages of the killed run are suspects. If that run has already finished,
            # there are none.
            suspects = self.slot.running_in(kill.run_seq)
        # With several suspects, none is charged. The next process runs them in smaller rounds.
        charged = suspects[0] if len(suspects) == 1 else None
        crashed = unexpected or (kill is not None and kill.reason in _KILLED_FOR_FAILING)
        return Blame(not unexpected, crashed, suspects, charged)

    def _note_blame(self, blame: Blame, *, idle: bool) -> None:
        """Record the suspects, which the next process runs in rounds to find the cause.

        `idle` is true if no message was running, and the exit was not a reported boot failure.
        """
        if not self.slot.suspects_left:
            self.suspects = {}  # all suspects have run without a crash
        if blame.crashed and blame.suspects:
            self._add_suspects(blame.suspects)
        if not blame.expected and idle:
            self.uncharged += 1
        elif blame.charged is not None or not blame.crashed:
            self.uncharged = 0

    def _add_suspects(self, running: list[bytes]) -> None:
        self.suspects = rounds.after_crash(self.suspects, running, ENTRIES_MAX)

    def _count_crash(self, exit_: Exit, kill: Kill | None) -> None:
        how = f"{kill.reason}: {exit_}" if kill else str(exit_)
        self.last_exit = f"{how}: {exit_.problem}" if exit_.problem else how
        self.slot.add("crashes")
        self.slot.failures.note(f"process terminated with {how}", now_ns())

    def _clear_slot(self, suspects: list[bytes]) -> None:
        """Clear the slot for the next process.

        If a refence follows, its messages stay in the slot until Redis replies. If the supervisor
        is killed before that, its successor reads them there and repeats the refence.
        """
        if isinstance(self.step, Refencing):
            self.slot.acquit(suspects)
            self.slot.note_lease(self.lease, self.step.new_token)
            self.slot.vacate()
        else:
            self.slot.clear()

    def plan_restart(self, found: ExitAssessment, now: float, daemon: Daemon) -> bool:
        """Set the time at which the next process may be forked, as the restart policy requires.

        Return False after too many crashes. In that case, the partition pauses for
        `daemon.crash_cooldown`.
        """
        crashes = self.consumer.max_crashes
        kept = restart.history_max(crash_loop=daemon.crash_loop, max_crashes=crashes)
        if not found.narrowed:  # a smaller round is progress, so it does not increase the backoff
            end = restart.WorkerExit(now, found.cause, found.lived, found.settled)
            self.exits = [*self.exits, end][-kept:]
        decision = restart.decide(
            self.exits,
            now,
            backoff=daemon.crash_backoff,
            crash_loop=daemon.crash_loop,
            cooldown=daemon.crash_cooldown,
            max_crashes=crashes,
            jitter=random(),
        )
        if isinstance(decision, restart.Restart):
            self.start_at = now + decision.after
            return True
        self.broken_until = self.start_at = decision.until
        self.slot.state = WorkerState.BROKEN
        return False

    def dismiss(self, *, unexplained: bool = False) -> tuple[Child, ExitAssessment]:
        """Detach a worker that handles no more messages, and process it as if it had exited.

        Return its process, which may still be running `on_stop`. `unexplained` must be true if the
        worker was not asked to stop. In that case, the consumer group may be missing in Redis, so
        it is created again before the next fork.
        """
        assert self.worker is not None
        child = self.worker.child
        if unexplained:
            self.groups_ready = False
        return child, self.on_exit(Exit(ExitCode.STOPPED, None))

    def abandon(self) -> Child | None:
        """Detach a process that hangs in the kernel even though it was killed, and return it.

        The caller reaps the process later. Until it exits, it may still write to its slot. So the
        slot cannot be trusted, and no message is acknowledged or charged. A new token makes Redis
        reject its writes, and then the lease is released.
        """
        child, self.worker = self.child, None
        if isinstance(self.step, HeldLease):
            # The slot still belongs to the process, so another instance must acquire the
            # assignment.
            self.step = Refencing(secrets.token_hex(16), release_after=True)
            self.leaving = "unkillable"
            self.slot.forget_lease()  # a successor must not read the slot either
        return child

    def fail(self, until: float, problem: str) -> None:
        """Give up the assignment until a monotonic time, because of an internal error.

        This is possible in any phase, but the caller must have removed its processes. No message is
        acknowledged or charged, so all pending messages run again.
        """
        assert self.worker is None
        assert self.standby is None
        self.broken_until = self.start_at = until
        self.last_exit, self.exits = problem, []
        self.suspects, self.uncharged = {}, 0
        lease, known = self.lease, self.phase not in (Phase.FREE, Phase.RELEASING)
        self.become_free()
        if known:
            self.step, self.lease, self.leaving = Releasing(), lease, "failed"
        self.slot.clear()
        self.slot.standby_pid = self.slot.warm_pid = 0
        self.slot.state = WorkerState.FAILED

    def standby_ended(self) -> None:
        """Record that the standby has exited."""
        self.standby = None
        self.slot.standby_pid = 0

    def message_rate(self, now: float) -> float:
        """Return the messages per second that the worker finishes.

        If it has not finished any yet, return the rate of the last worker that did, or 0.
        """
        return (self.worker.pace(now) if self.worker is not None else 0.0) or self.pace

    def record_start(self, child: Child, now: float) -> None:
        """Record that a process has become the worker, because it was forked or was the standby."""
        self.worker = RunningWorker(child, self.slot, self.consumer, now)
        self.slot.pid = child.pid

    def _plan_next_call(
        self, exit_: Exit, worker: RunningWorker, refence: Refencing, *, expected: bool
    ) -> None:
        """Plan the call to Redis that must follow the exit of the process.

        This is usually `refence`. It is a release if the worker leaves and no message has to be
        acknowledged or charged, and there is none if the lease is lost.
        """
        if not isinstance(self.step, HeldLease):
            return  # the lease was lost in the meantime, so its token can settle nothing
        if expected and exit_.code == ExitCode.FENCED:
            self.become_free()
            return
        if expected and exit_.code == ExitCode.NO_GROUP:
            self.groups_ready = False
        leaving = worker.stop_reason in ("shed", "drain")
        self.leaving = worker.stop_reason if leaving else ""
        if leaving and not refence.done and refence.charged is None and worker.kill is None:
            self._release()
            return
        self.step = replace(refence, release_after=leaving)

    @property
    def phase(self) -> Phase:
        """The step that the assignment has reached, without the arguments of the step's call."""
        return self.step.phase

    @property
    def child(self) -> Child | None:
        """The process of the worker."""
        return self.worker.child if self.worker is not None else None

    @property
    def stop_reason(self) -> str:
        """The reason why the worker was commanded to stop, or '' if it was not."""
        return self.worker.stop_reason if self.worker is not None else ""

    @property
    def is_quiet(self) -> bool:
        """True if the worker has reported that it handles no more messages."""
        return self.worker is not None and self.worker.is_quiet

    @property
    def is_ready(self) -> bool:
        """True if the worker has booted and is either working or paused."""
        return self.worker is not None and self.worker.is_ready

    @property
    def resumed(self) -> ResumableAssignment | None:
        """The state that a killed supervisor left, or None once it has been taken over."""
        return self.step.resumed if isinstance(self.step, Acquiring | Refencing) else None

    @property
    def housekeeping(self) -> tuple[int, int]:
        """The number of the housekeeper's last reclaim request, and the start of a missed poll.

        A long poll is missed if it did not report an entry that exists. If either value changes,
        the worker must be woken. Source: slot.
        """
        return self.slot.reclaim_requested, self.slot.poll.missed

    @property
    def owned(self) -> bool:
        """True while this instance owns the lease, even if it is replacing the token."""
        return self.phase in (Phase.HELD, Phase.REFENCING)

    @property
    def crashed(self) -> bool:
        """True unless the assignment is paused because of an internal error of the supervisor."""
        return self.slot.state != WorkerState.FAILED

    @property
    def release_after(self) -> bool:
        """True if a refence is in progress, after which the lease will be released."""
        return isinstance(self.step, Refencing) and self.step.release_after

    @property
    def releasable(self) -> bool:
        """True if there is no worker, and the lease is neither free nor already being released."""
        if self.worker is not None:
            return False
        refencing = self.phase is Phase.REFENCING and not self.release_after
        return refencing or self.phase in (Phase.ACQUIRING, Phase.HELD)

    @property
    def startable(self) -> bool:
        """True if a process may be forked as soon as `start_at` has passed."""
        return self.phase is Phase.HELD and self.worker is None and self.groups_ready

    @property
    def standby_is_warm(self) -> bool:
        """True if the standby has booted and can replace the worker."""
        return self.standby is not None and self.slot.warm_pid == self.standby.pid

    @property
    def wants_exchange(self) -> bool:
        """True if a call for the assignment is due, and Redis has not refused its last one."""
        if self.refusal:
            return False
        waiting = self.phase not in (Phase.FREE, Phase.HELD)
        return waiting or (self.phase is Phase.HELD and not self.groups_ready)

    @property
    def is_stuck(self) -> bool:
        """True if Redis refuses the current call because an operator must repair a value first."""
        only_this_key = refusal_kind_for_code(self.refusal) is RefusalKind.BAD_KEY_OR_COMMAND
        return only_this_key and self.refused == self.phase.value


def _crash_context(exit_: Exit, worker: RunningWorker) -> bytes:
    """Return JSON that describes how the process of a charged message has exited."""
    return json.dumps(
        {
            "what": "a hard time limit" if worker.kill else str(exit_),
            "signal": exit_.signal_name or None,
            "exitCode": exit_.code,
            "rss": worker.child.peak_rss,
            "pid": worker.child.pid,
        }
    ).encode()


_KILLED_FOR_FAILING = ("hard-limit", "boot", "stalled")
ORDERLY = (ExitCode.STOPPED, ExitCode.FENCED, ExitCode.RECYCLE, ExitCode.NO_GROUP)
