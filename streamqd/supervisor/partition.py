"""The state of one assignment in the supervisor: its lease, its process and its next step.

This is a state machine that does no I/O. `intent` returns the next call to Redis, and `apply_reply`
processes the reply. `startable` is true if a worker may be forked, and `on_exit` processes the exit
of the worker's process. Each call is repeated with the same arguments until Redis replies, so a
lost reply does no harm. If the supervisor dies before the reply to a refence arrives, only the
recorded cause of the crash is lost.

    FREE ── acquire ──► ACQUIRING ── OK ──► HELD ── process exits ──► REFENCING ── OK ──► HELD
                         │                │                                │ (new token)
                         └── release ─────┴── release, or it was leaving ──┘
                                          ▼
                                      RELEASING ── answered ──► FREE

A *refence* replaces the token in the fence. It also acknowledges finished messages and may charge
one, so REFENCING is left only when Redis replies. If no message has to be acknowledged or charged,
HELD leads directly to RELEASING. A refused acquire or a lost lease leads to FREE. An assignment of
a killed supervisor (`resume`) starts in REFENCING, or reaches it through ACQUIRING.
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
    """The step of an assignment, without its arguments."""

    FREE = "free"
    ACQUIRING = "acquiring"
    HELD = "held"
    REFENCING = "refencing"  # the values appear in the log
    RELEASING = "releasing"


class Blame(NamedTuple):
    """The messages that may have caused the exit of a process.

    If there is exactly one suspect, it is charged. The other values depend on the kind of exit:

    | Exit                            | `expected` | `crashed` | `suspects`                  |
    | planned                         | yes        | no        | none                        |
    | killed: hard limit              | yes        | yes       | messages of the killed run  |
    | killed: boot time, stalled      | yes        | yes       | none                        |
    | killed for another reason       | yes        | no        | none                        |
    | any other                       | no         | yes       | messages that ran           |
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
    lived: float = 0.0  # how many seconds the process was ready
    settled: int = 0  # number of messages that it finished, successfully or not
    lost: bool = False  # True if it was the first to notice that the lease has another owner
    # True if it finished no message, and the crash only makes the rounds of its suspects smaller.
    narrowed: bool = False


@dataclass(frozen=True, slots=True)
class Free:
    """This instance neither owns the assignment nor tries to acquire it."""

    phase: ClassVar[Phase] = Phase.FREE


@dataclass(frozen=True, slots=True)
class Acquiring:
    """The arguments of an acquire. `dead_token` is the token of an owner that has exited."""

    phase: ClassVar[Phase] = Phase.ACQUIRING

    dead_token: str = ""
    resumed: ResumableAssignment | None = None  # state that a killed supervisor left


@dataclass(frozen=True, slots=True)
class HeldLease:
    """This instance owns the assignment, and a worker may run."""

    phase: ClassVar[Phase] = Phase.HELD


@dataclass(frozen=True, slots=True)
class Refencing:
    """The arguments of a refence, which acknowledges messages and may charge one."""

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
    suspects: rounds.Suspects = field(default_factory=dict)  # the next process runs them in rounds
    # True if `suspects` contains all messages that were running when the last owner exited.
    suspects_complete: bool = False
    uncharged: int = 0  # number of consecutive processes that crashed while no message ran
    exits: list[restart.WorkerExit] = field(default_factory=list)
    broken_until: float = 0.0
    last_exit: str = ""
    refusal: str = ""  # code of the last error reply, kept so that repetitions are not logged
    refused: str = ""  # phase of the refused call, or `group`
    relayed: tuple[int, int] = (0, 0)  # value of `housekeeping` when the worker was last woken
    pace: float = 0.0  # messages per second that an earlier process finished
    leaving: str = ""  # reason for the next release, which the release records in Redis

    def __post_init__(self) -> None:
        # Until the lease is acquired, its epoch is the last one that was seen in Redis.
        self.lease = Lease(self.assignment, "")

    # --- intents ---

    def resume(self, found: ResumableAssignment, *, alone: bool) -> None:
        """Plan to resume the lease of a killed supervisor, as after a crash of its worker.

        A refence replaces the token, and Redis refuses it if another instance has owned the
        assignment in the meantime. Finished messages are acknowledged. `alone` is true if no
        messages were running in other assignments. If it is false, any of the running messages may
        have killed the supervisor, so none is charged. Instead, they run in marked rounds, as after
        the loss of a host. Messages that were only waiting are not suspects.
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
            # If a refence was in progress, the worker had exited before the supervisor, for an
            # unknown reason.
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
        """Plan to acquire the lease, whose epoch in Redis was last `seen_epoch`.

        `dead_token` is the token of an owner that has exited, or ''.
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
                # It is unknown whether Redis has executed the acquire. A release with its token is
                # correct in both cases.
                self.step = Releasing()

    def _release(self) -> None:
        self.step = Releasing()
        self.slot.forget_lease()  # all messages are finished, so a successor has nothing to resume

    def intent(self, keys: Keys, ttl: float, owner: str) -> Call | None:
        """Return the call to send now, or None. It stays the same until Redis replies."""
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
        """Process the reply to `intent`. Return a word for the log, or ''."""
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
            self.slot.restore(resumed.done, [])  # the acquire has already charged the messages
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
        # Clear the batch before the token changes, because it would be charged again under the new
        # token.
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
        """Process the exit of the worker's process: find the suspects, and plan the next call."""
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
        """Assess the exit of the process from its code, its kill and the running messages."""
        # The code alone proves nothing, because a handler can exit with any code. A worker that
        # exits as planned becomes quiet first.
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
        """Record the suspects, which the next process runs in rounds.

        `idle` is true if no message was running.
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
        """Clear the slot, except for its batch if a refence still has to settle the messages."""
        if isinstance(self.step, Refencing):
            # Keep the batch until Redis replies to the refence.
            self.slot.acquit(suspects)
            self.slot.note_lease(self.lease, self.step.new_token)
            self.slot.vacate()
        else:
            self.slot.clear()

    def plan_restart(self, found: ExitAssessment, now: float, daemon: Daemon) -> bool:
        """Set the earliest time of the next fork, as the restart policy requires.

        Return False after too many crashes. The partition then pauses for `daemon.crash_cooldown`.
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
        """Detach a quiet process, which handles no more messages.

        `unexplained` is true if the reason for its exit is unknown. The group may then be missing.
        """
        assert self.worker is not None
        child = self.worker.child
        if unexplained:
            self.groups_ready = False
        return child, self.on_exit(Exit(ExitCode.STOPPED, None))

    def abandon(self) -> Child | None:
        """Detach an unkillable process, which hangs in the kernel.

        The process may still write to its slot, so the slot cannot be trusted, and no message is
        acknowledged or charged. Only a new token prevents the process from writing to Redis. Return
        the process, which the caller reaps later.
        """
        child, self.worker = self.child, None
        if isinstance(self.step, HeldLease):
            # The slot still belongs to the process, so another instance must take over.
            self.step = Refencing(secrets.token_hex(16), release_after=True)
            self.leaving = "unkillable"
            self.slot.forget_lease()  # a successor must not read the slot either
        return child

    def fail(self, until: float, problem: str) -> None:
        """Give up the assignment until the given monotonic time. This is possible in any phase.

        The caller must have removed its processes. No message is acknowledged or charged, so all
        pending messages run again.
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
        """Return the messages per second of the worker, or of the last one that finished any."""
        return (self.worker.pace(now) if self.worker is not None else 0.0) or self.pace

    def record_start(self, child: Child, now: float) -> None:
        """Record the process that was forked or adopted as the worker."""
        self.worker = RunningWorker(child, self.slot, self.consumer, now)
        self.slot.pid = child.pid

    def _plan_next_call(
        self, exit_: Exit, worker: RunningWorker, refence: Refencing, *, expected: bool
    ) -> None:
        """Plan the call that must follow the exit of the process, usually the refence."""
        if not isinstance(self.step, HeldLease):
            return  # the lease was lost while the process ran, so its token can settle nothing
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
        """The step without its arguments."""
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
        """The state that a killed supervisor left, until Redis replies to the refence."""
        return self.step.resumed if isinstance(self.step, Acquiring | Refencing) else None

    @property
    def housekeeping(self) -> tuple[int, int]:
        """The numbers of the housekeeper's reclaim requests and missed polls. Source: slot."""
        return self.slot.reclaim_requested, self.slot.poll.missed

    @property
    def owned(self) -> bool:
        """True while this instance owns the lease, which a renewal or refence extends."""
        return self.phase in (Phase.HELD, Phase.REFENCING)

    @property
    def crashed(self) -> bool:
        """True if a pause of the assignment was caused by crashes and not by an internal error."""
        return self.slot.state != WorkerState.FAILED

    @property
    def release_after(self) -> bool:
        """True if the lease will be released after the reply to a refence in progress."""
        return isinstance(self.step, Refencing) and self.step.release_after

    @property
    def releasable(self) -> bool:
        """True if `release` is possible and would change the phase or the plan."""
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
        """True if the assignment has a call for Redis, and Redis did not refuse its last one."""
        if self.refusal:
            return False
        waiting = self.phase not in (Phase.FREE, Phase.HELD)
        return waiting or (self.phase is Phase.HELD and not self.groups_ready)

    @property
    def is_stuck(self) -> bool:
        """True if Redis refuses the call because of an invalid value that must be repaired."""
        only_this_key = refusal_kind_for_code(self.refusal) is RefusalKind.BAD_KEY_OR_COMMAND
        return only_this_key and self.refused == self.phase.value


def _crash_context(exit_: Exit, worker: RunningWorker) -> bytes:
    """Return how the process of a charged message exited, as JSON."""
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
