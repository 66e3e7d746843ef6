"""One unit as the supervisor sees it: who owns it, which process handles it, what is due next.

It is a small state machine. It says what it wants of Redis (`intent`) and takes the answer
(`answered`); it says whether a process should run and takes how one ended (`ended`).
Every wanted call is repeated with equal arguments until it is answered, so a lost reply costs
nothing. No I/O happens here.

    FREE ── take ──► ACQUIRING ── OK ──► HELD ── the process ended ──► REFENCING ── OK ──► HELD
                         │                │                                │ (new token)
                         └── give up ─────┴── give up, or it was leaving ──┘
                                          ▼
                                      RELEASING ── answered ──► FREE

The refence acknowledges and charges, too, so REFENCING is left only when it is answered. Where
nothing is to be settled, HELD is followed by RELEASING at once. A refused acquire, and the loss of
the lease, lead to FREE. What a killed supervisor held (`resume`) begins as REFENCING, or comes
there from ACQUIRING.
"""

from __future__ import annotations

import enum
import json
import secrets
import time
from dataclasses import dataclass, field
from random import random
from typing import NamedTuple

from streamqd.config import Consumer, Daemon
from streamqd.errors import RedisRefused, RefusalKind, kind_of
from streamqd.model import ENTRIES_MAX, Lease, Unit
from streamqd.policy import restart, rounds
from streamqd.process import Child, Exit
from streamqd.scoreboard import Batch, WorkerSlot, WorkerState, now_ns
from streamqd.store import leases
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply
from streamqd.supervisor.scoreboard_file import ResumablePartition
from streamqd.worker import ExitCode

ON_STOP_SECONDS = 30.0  # what `on_stop` and the end of a worker without work may take


class Phase(enum.Enum):
    """Where a unit stands between free and held."""

    FREE = "free"
    ACQUIRING = "acquiring"
    HELD = "held"
    REFENCING = "refencing"  # the word that the log shows
    RELEASING = "releasing"


class Kill(NamedTuple):
    """A SIGKILL that the supervisor decided: why, and for which run it was meant."""

    reason: str  # hard-limit | boot | stalled | on_stop | deadline | quit | unstarted
    run_seq: int


class Blame(NamedTuple):
    """Who is to blame for the end of a process: one of `suspects`, `charged` if it is the only one.

    `orderly`: it ended by itself and as it should, or the supervisor has killed it.
    """

    orderly: bool
    crashed: bool
    suspects: list[bytes]
    charged: bytes | None


class ExitAssessment(NamedTuple):
    """What the end of a process means. `lived` is how long it was ready, in seconds."""

    crashed: bool
    cause: restart.ExitCause
    charged: bytes | None
    lived: float = 0.0
    settled: int = 0  # messages of which it had ended the run
    lost: bool = False  # the process found that the unit has another owner, which is news
    narrowed: bool = False  # it died in a round of several suspects, and has finished no message


@dataclass
class PartitionState:
    """The supervisor's record of one unit."""

    unit: Unit
    consumer: Consumer
    slot: WorkerSlot
    phase: Phase = Phase.FREE
    since: float = 0.0  # monotonic, when this instance got it
    renew_at: float = 0.0
    child: Child | None = None
    works_by: Consumer | None = None  # what the child was started with, unchanged by a reload
    standby: Child | None = None  # boots, or has booted, to follow on the child
    stop_reason: str = ""  # why the child was told to stop: shed, drain, reload, recycle, lost
    kill: Kill | None = None
    killed_at: float = 0.0
    release_after: bool = False  # release the unit once the refence is answered
    groups_ready: bool = False
    start_at: float = 0.0  # monotonic, not before
    refused_since: float = (
        0.0  # monotonic, since when the system refuses its process; 0 = it does not
    )
    suspects: rounds.Suspects = field(default_factory=dict)  # run in rounds next
    uncharged: int = 0  # processes in a row that died with nothing to blame
    exits: list[restart.WorkerExit] = field(default_factory=list)
    ready_at: float = 0.0  # monotonic, 0 = has not booted
    quiet_at: float = 0.0  # monotonic, when its process was seen to have nothing to do any more
    _settled_before: int = 0
    _recycled_before: int = 0
    broken_until: float = 0.0
    last_exit: str = ""
    refusal: str = ""  # code of the error reply that is being repeated, so it is logged once
    refused: str = ""  # the phase in which it was refused, or group
    started: float = 0.0
    soft_limited: int = 0  # run sequence that got its soft limit
    relayed: tuple[int, int] = (0, 0)  # what the housekeeper wanted when the worker was woken last
    pace: float = 0.0  # messages per second that the process before this one settled
    spread: float = 0.0  # 0 to 1, drawn for each process
    _first_run: int = 0
    _dead_token: str = ""
    _new_token: str = ""
    _done: list[bytes] = field(default_factory=list)
    _charged: bytes | None = None
    _context: bytes = b""
    resumable: ResumablePartition | None = (
        None  # of a killed supervisor, until Redis has answered to it
    )

    def __post_init__(self) -> None:
        # While it is acquired, the epoch is the last one that was seen.
        self.lease = Lease(self.unit, "")

    # --- intents ---

    def resume(self, found: ResumablePartition, *, alone: bool) -> None:
        """Want to go on with what a killed supervisor held, as after the death of its worker.

        Its token is replaced, which Redis refuses when somebody has owned the unit meanwhile.
        `alone`: nothing ran in other units. Else any of what ran may have killed them all: nobody
        is charged, and what is pending runs one at a time behind a mark, as after the loss of a
        host; what had ended is acknowledged then.
        """
        assert self.phase is Phase.FREE
        self.resumable = found
        if not (alone or found.next_token):
            self.slot.restore(found.done, found.running)
            self.slot.note_lease(found.lease)
            self.take(found.lease.epoch, found.lease.token)
            self._done = found.done
            return
        self.phase = Phase.REFENCING
        self.lease, self._new_token = found.lease, found.next_token or secrets.token_hex(16)
        self._done = found.done
        self._charged = found.running[0] if len(found.running) == 1 else None
        if self._charged is None:
            self._suspect(found.running)
        else:
            self._context = json.dumps({"what": "the death of its supervisor"}).encode()
        self.slot.restore(found.done, found.running)
        self.slot.note_lease(self.lease, self._new_token)

    def take(self, seen_epoch: int, dead_token: str = "") -> None:
        """Want to own the unit. `dead_token` belongs to a predecessor proven dead."""
        assert self.phase is Phase.FREE
        self.phase = Phase.ACQUIRING
        self.lease = Lease(self.unit, secrets.token_hex(16), seen_epoch)
        self._dead_token = dead_token
        # A process that died after the unit was lost has left nothing that is still ours.
        self._done, self._charged, self._context = [], None, b""

    def give_up(self) -> None:
        """Want to release the unit; its process must have ended."""
        assert self.child is None
        self.refused_since = 0.0
        if self.phase is Phase.REFENCING:
            self.release_after = True
        elif self.phase is Phase.HELD:
            self._release()
        elif self.phase is Phase.ACQUIRING:
            # The acquire may have been executed: a release with its token covers both cases.
            self.phase = Phase.RELEASING

    def _release(self) -> None:
        self.phase = Phase.RELEASING
        self.slot.forget_lease()  # nothing is unfinished: there is nothing to resume

    def intent(self, keys: Keys, ttl: float, owner: str) -> Call | None:
        """The call to make now, the same one until it is answered."""
        if self.phase is Phase.ACQUIRING:
            return leases.acquire(keys, self.lease, ttl, owner, self._dead_token)
        if self.phase is Phase.REFENCING:
            return leases.refence(
                keys,
                self.lease,
                self._new_token,
                ttl,
                self._charged,
                self._context,
                self._done,
            )
        if self.phase is Phase.RELEASING:
            return leases.release(keys, self.lease)
        return None

    # --- answers ---

    def answered(self, reply: Reply | RedisRefused, now: float) -> str:
        """Take the answer to `intent`. Returns a word for the log, '' for none."""
        if isinstance(reply, RedisRefused):
            # Nothing was done; it is wanted again at the next exchange.
            return ""
        if self.phase is Phase.ACQUIRING:
            return self._acquired(reply, now)
        if self.phase is Phase.REFENCING:
            return self._refenced(reply, now)
        if self.phase is Phase.RELEASING:
            self.become_free()
            return "released"
        return ""

    def _acquired(self, reply: Reply, now: float) -> str:
        if reply.word not in ("OK", "MINE"):
            self.phase = Phase.FREE
            self._drop_token()
            self.resumable = None
            return ""
        self.phase = Phase.HELD
        self.lease = self.lease._replace(epoch=int(reply.rest[0]))
        if self.resumable is not None:
            self.phase = Phase.REFENCING
            self._new_token = secrets.token_hex(16)
            self.slot.restore(self._done, [])  # blame has been settled already
            self.slot.note_lease(self.lease, self._new_token)
            return "acquired"
        self.slot.forget_batch()  # what is in it belongs to a process of the past
        self.slot.note_lease(self.lease)
        self._owns_from(now)
        return "acquired"

    def _owns_from(self, now: float) -> None:
        self.since = now
        self.groups_ready = False
        self.refused_since = 0.0
        self.slot.since_unix_ms = int(time.time() * 1000)
        self.slot.owned = 1
        if self.slot.state == WorkerState.GONE:
            self.slot.state = WorkerState.BOOTING  # nothing has ended: its process is on its way

    def _refenced(self, reply: Reply, now: float) -> str:
        # Before the token: with the new one in its place, the batch would be charged again.
        self.slot.forget_batch()
        resumed, self.resumable = self.resumable is not None, None
        if reply.word != "OK":
            self.become_free()
            return "lost"
        self.lease = Lease(self.unit, self._new_token, int(reply.rest[0]))
        if self.release_after:
            self.slot.forget_lease()
        else:
            self.slot.note_lease(self.lease)
        charged = "charged" if self._charged is not None else ""
        if resumed:
            self._owns_from(now)
            charged = "resumed"
        if self._charged is not None:
            self.slot.add("charged")
        self.slot.add("acked", len(self._done))
        self._done, self._charged, self._context = [], None, b""
        self.phase = Phase.RELEASING if self.release_after else Phase.HELD
        self.release_after = False
        return charged

    def become_free(self) -> None:
        """The unit is not ours any more."""
        self.phase = Phase.FREE
        self._drop_token()
        self.release_after = False
        self.resumable = None
        self.slot.forget_lease()
        self.slot.owned = 0
        self.slot.trusted_until_ns = 0

    def _drop_token(self) -> None:
        self.lease = self.lease._replace(token="")

    # --- the process ---

    def ended(self, exit_: Exit) -> ExitAssessment:
        """Take the end of the process: find whom to blame, and want what follows."""
        lived, settled = self.lived(time.monotonic()), self.settled()
        batch, held = self.slot.batch(), self.phase is Phase.HELD
        blame = self._blame(exit_, batch)
        if not held:
            # Another owner handles what is pending: nothing can be charged under our token.
            blame = blame._replace(suspects=[], charged=None)
        narrowed = blame.crashed and not settled and rounds.narrows(self.suspects, blame.suspects)
        self._note_blame(blame, idle=not batch.running and exit_.code != ExitCode.BOOT_FAILED)
        self._done = batch.done
        self._charged = blame.charged
        if blame.charged is not None:
            self._context = self._crash_context(exit_, self.kill)
        if blame.crashed:
            self._count_crash(exit_)
        if self.stop_reason == "recycle" and self.slot.counter("recycled") == self._recycled_before:
            self.slot.add("recycled")  # else it has reached a limit of its own meanwhile
        self._follow_on(exit_, orderly=blame.orderly)
        lost = held and self.phase is Phase.FREE
        self._forget_process(blame.suspects)
        cause = restart.ExitCause.ORDERED
        if blame.crashed and batch.running:
            cause = restart.ExitCause.HANDLING
        elif blame.crashed:
            cause = restart.ExitCause.IDLE if self.ready_at else restart.ExitCause.BOOT
        return ExitAssessment(blame.crashed, cause, blame.charged, lived, settled, lost, narrowed)

    def _blame(self, exit_: Exit, batch: Batch) -> Blame:
        """Judge the end of the process by its exit, by why it was killed, and by what ran."""
        kill = self.kill
        # A handler can end its process with any code; a worker that ends by itself is quiet first.
        quiet = self.slot.state == WorkerState.QUIET and not batch.running
        unordered = kill is None and not (quiet and exit_.code in ORDERLY)
        suspects = batch.running if unordered else []
        if kill is not None and kill.reason == "hard-limit":
            # Of those that run, only what the kill was meant for; nothing when that has ended.
            suspects = self.slot.running_in(kill.run_seq)
        # With several running none is charged: the next process runs them in smaller rounds.
        charged = suspects[0] if len(suspects) == 1 else None
        crashed = unordered or (kill is not None and kill.reason in _KILLED_FOR_FAILING)
        return Blame(not unordered, crashed, suspects, charged)

    def _note_blame(self, blame: Blame, *, idle: bool) -> None:
        """Let the next process run suspects in rounds. `idle`: nothing ran, so none is to blame."""
        if not self.slot.suspects_left:
            self.suspects = {}  # all have run, and none of them has killed it
        if blame.crashed and blame.suspects:
            self._suspect(blame.suspects)
        if not blame.orderly and idle:
            self.uncharged += 1
        elif blame.charged is not None or not blame.crashed:
            self.uncharged = 0

    def _suspect(self, running: list[bytes]) -> None:
        self.suspects = rounds.after_crash(self.suspects, running, ENTRIES_MAX)

    def _count_crash(self, exit_: Exit) -> None:
        how = f"{self.kill.reason}: {exit_}" if self.kill else str(exit_)
        self.last_exit = f"{how}: {exit_.problem}" if exit_.problem else how
        self.slot.add("crashes")
        self.slot.failures.note(f"process ended by {how}", now_ns())

    def _forget_process(self, suspects: list[bytes]) -> None:
        """Leave in the slot only what the next token settles: what it had fetched, if that."""
        self.child = None
        self.kill = None
        self.stop_reason = ""
        self.soft_limited = 0
        if self.phase is Phase.REFENCING:
            # What it had fetched stays written down until Redis has answered.
            self.slot.acquit(suspects)
            self.slot.note_lease(self.lease, self._new_token)
            self.slot.vacate()
        else:
            self.slot.clear()

    def plan_restart(self, found: ExitAssessment, now: float, daemon: Daemon) -> bool:
        """Let the restart policy say when the next process may be forked.

        False when too many have ended: the partition rests for a while.
        """
        crashes = self.consumer.max_crashes
        kept = restart.history_max(crash_loop=daemon.crash_loop, max_crashes=crashes)
        if not found.narrowed:  # a smaller round is progress: to wait would be the stall
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
        """Go on without the process: it is quiet, what it still does is no work.

        `unexplained`: why it has ended is not known, perhaps because its group is gone.
        """
        child = self.child
        assert child is not None
        if unexplained:
            self.groups_ready = False
        return child, self.ended(Exit(ExitCode.STOPPED, None))

    def abandon(self) -> Child | None:
        """Go on without a process that does not die (it hangs in the kernel).

        Its slot cannot be read while it may still write, so nothing is acknowledged for it and
        no message is charged; the new token alone keeps it out. Returns it, to be collected later.
        """
        child, self.child = self.child, None
        self.kill = None
        self.stop_reason = ""
        if self.phase is Phase.HELD:
            self.phase = Phase.REFENCING
            self._new_token = secrets.token_hex(16)
            self.slot.forget_lease()  # nor may a successor read it
            # Its slot is still its own: another instance goes on with the unit.
            self.release_after = True
        return child

    def fail(self, until: float, problem: str) -> None:
        """Give the unit up until `until` (monotonic), whatever state it is in.

        Its processes must have been taken away. Nothing is acknowledged or charged for them: what
        is pending runs again.
        """
        assert self.child is self.standby is None
        self.kill, self.stop_reason = None, ""
        self.broken_until = self.start_at = until
        self.last_exit, self.exits = problem, []
        self.suspects, self.uncharged = {}, 0
        self._done, self._charged, self._context = [], None, b""
        lease, known = self.lease, self.phase not in (Phase.FREE, Phase.RELEASING)
        self.become_free()
        if known:
            self.phase, self.lease = Phase.RELEASING, lease
        self.slot.clear()
        self.slot.standby_pid = self.slot.warm_pid = 0
        self.slot.state = WorkerState.FAILED

    def became_ready(self, now: float, rss: int) -> None:
        """Note that the process has booted, and how much memory it had then."""
        self.ready_at = now
        self.slot.rss_baseline = rss

    def note_quiet(self, now: float) -> None:
        """Note since when the process has nothing to do any more."""
        self.quiet_at = (self.quiet_at or now) if self.is_quiet else 0.0

    def standby_ended(self) -> None:
        """Note the end of the standby."""
        self.standby = None
        self.slot.standby_pid = 0

    def lived(self, now: float) -> float:
        """Seconds since the process was ready."""
        return now - self.ready_at if self.ready_at else 0.0

    @property
    def has_worked(self) -> bool:
        """Whether the present process has begun to handle a message."""
        return self.slot.run_seq != self._first_run

    def pace_of(self, now: float) -> float:
        """Messages per second: of the present process, or of the last while it has settled none."""
        settled = self._settled_total() - self._settled_before
        return settled / max(0.001, self.lived(now)) if settled else self.pace

    def remaining_of(self, limit: int) -> int:
        """How many more of `limit` messages the present process may settle."""
        return limit - (self._settled_total() - self._settled_before)

    def settled(self) -> int:
        """Messages of which the present process has ended the run, well or not.

        Messages that it dead-lettered for earlier crashes do not count: they prove no health.
        """
        return self._settled_total() - self._settled_before + len(self.slot.batch().done)

    def started_as(self, child: Child, now: float) -> None:
        """Take note of the process that was forked for the unit."""
        self.pace = self.pace_of(now)
        self.child, self.works_by = child, self.consumer
        self.started = now
        self.ready_at = self.quiet_at = 0.0
        self.stop_reason = ""
        self._settled_before = self._settled_total()
        self._recycled_before = self.slot.counter("recycled")
        self._first_run = self.slot.run_seq
        self.slot.pid = child.pid

    def _settled_total(self) -> int:
        return self.slot.counter("acked") + self.slot.counter("failed")

    def _follow_on(self, exit_: Exit, *, orderly: bool) -> None:
        """Want the call that follows on the end of the process."""
        if self.phase is not Phase.HELD:
            return  # lost while it ran: there is nothing to settle under our token
        if orderly and exit_.code == ExitCode.FENCED:
            self.become_free()
            return
        if orderly and exit_.code == ExitCode.NO_GROUP:
            self.groups_ready = False
        leaving = self.stop_reason in ("shed", "drain")
        if leaving and not self._done and self._charged is None and self.kill is None:
            self._release()
            return
        self.phase = Phase.REFENCING
        self._new_token = secrets.token_hex(16)
        self.release_after = leaving

    def _crash_context(self, exit_: Exit, kill: Kill | None) -> bytes:
        what = "a hard time limit" if kill else str(exit_)
        return json.dumps(
            {
                "what": what,
                "signal": exit_.signal_name or None,
                "exitCode": exit_.code,
                "rss": self.child.peak_rss if self.child else None,
                "pid": self.child.pid if self.child else None,
            }
        ).encode()

    @property
    def housekeeping(self) -> tuple[int, int]:
        """What the housekeeper has wanted of the worker by now."""
        return self.slot.reclaim_requested, self.slot.poll.missed

    @property
    def owned(self) -> bool:
        """Whether a lease must be renewed for it."""
        return self.phase in (Phase.HELD, Phase.REFENCING)

    @property
    def crashed(self) -> bool:
        """Whether it rests because its processes crashed, and not after an error of ours."""
        return self.slot.state != WorkerState.FAILED

    @property
    def releasable(self) -> bool:
        """Whether `give_up` is possible and would change something."""
        if self.child is not None:
            return False
        refencing = self.phase is Phase.REFENCING and not self.release_after
        return refencing or self.phase in (Phase.ACQUIRING, Phase.HELD)

    @property
    def startable(self) -> bool:
        """Whether a process may be forked for it, times aside."""
        return self.phase is Phase.HELD and self.child is None and self.groups_ready

    @property
    def standby_is_warm(self) -> bool:
        """Whether a process has booted that can follow on the child."""
        return self.standby is not None and self.slot.warm_pid == self.standby.pid

    @property
    def is_quiet(self) -> bool:
        """Whether its process has said that it has nothing to do any more, by itself."""
        return self.child is not None and self.slot.state == WorkerState.QUIET and not self.kill

    @property
    def wants_exchange(self) -> bool:
        """Whether it has something to say to Redis that has not been refused before."""
        if self.refusal:
            return False
        waiting = self.phase not in (Phase.FREE, Phase.HELD)
        return waiting or (self.phase is Phase.HELD and not self.groups_ready)

    @property
    def is_stuck(self) -> bool:
        """Return True if its call is refused for a value in Redis, which only a repair ends."""
        of_a_key = kind_of(self.refusal) is RefusalKind.OF_A_KEY
        return of_a_key and self.refused == self.phase.value

    @property
    def ready(self) -> bool:
        """Whether its process has booted."""
        return self.child is not None and self.slot.state in (
            WorkerState.READY,
            WorkerState.PAUSED,
        )


_KILLED_FOR_FAILING = ("hard-limit", "boot", "stalled")
ORDERLY = (ExitCode.STOPPED, ExitCode.FENCED, ExitCode.RECYCLE, ExitCode.NO_GROUP)
