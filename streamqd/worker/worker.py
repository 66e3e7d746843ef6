"""A worker's life: boot, attach (recover what is pending), serve (fetch rounds), leave."""

from __future__ import annotations

import logging
import secrets
import socket
import time
from random import random

from streamqd import logs
from streamqd.bells import Bells
from streamqd.config import Consumer, Settings
from streamqd.errors import (
    HandlerLoadError,
    RedisRefused,
    RedisUnavailable,
    RefusalKind,
    SilentConnection,
)
from streamqd.idle_reason import IdleReason
from streamqd.message import Delivery
from streamqd.model import Unit
from streamqd.scoreboard import WorkerSlot, WorkerState, now_ns
from streamqd.store import items, messages
from streamqd.store.client import Connection
from streamqd.store.cluster import connect
from streamqd.store.doubt import Silence
from streamqd.store.fetch import Fetcher, FetchResult
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply
from streamqd.worker.assignment import Assignment, Reconnect
from streamqd.worker.control_channel import ControlChannel, ExitCode, Heard, Stop
from streamqd.worker.forks import family
from streamqd.worker.guards import Guards
from streamqd.worker.hooks import Hooks, boot
from streamqd.worker.kinds import runner_class
from streamqd.worker.pending_entry import PendingEntry, in_order
from streamqd.worker.prefetch import PrefetchController, bytes_of
from streamqd.worker.quarantine import Quarantine
from streamqd.worker.reclaim import Reclaim
from streamqd.worker.runs import RELEASE_SECONDS, Runner
from streamqd.worker.settler import PARK_SECONDS, Fenced, Settler

BLOCK_SECONDS = 15.0  # longest wait of one doorbell
REPLY_SECONDS = 10.0  # longest wait for an answer that does not block
DOUBT_SECONDS = 1.0  # after which a silent connection is doubted: `store/doubt.py`
RECOVER_PAGE = 64
IDLE_CHECK_SECONDS = 30.0
RECONNECT_SECONDS = (0.05, 2.0)  # first and longest wait between two connection attempts


def new_link(settings: Settings, unit: Unit) -> Connection:
    """Make the connection of a worker, which is not opened yet."""
    fence = Keys(settings.keys.control, settings.keys.streams).fence(*unit)
    name = f"streamqd:{unit}"
    return connect(settings.redis, timeout=REPLY_SECONDS, name=name, key=fence, doubt=DOUBT_SECONDS)


class WorkerProcess:
    """Handles one unit from boot to exit."""

    def __init__(
        self,
        orders: Assignment,
        settings: Settings,
        consumer: Consumer,
        slot: WorkerSlot,
        control: socket.socket,
        booted: tuple[Hooks, Connection] | None = None,
    ) -> None:
        """`booted`: what a standby has prepared already, with its connection."""
        self.unit = orders.unit
        self.token = orders.token
        self.settings = settings
        self.consumer = consumer
        self.slot = slot
        self.keys = Keys(settings.keys.control, settings.keys.streams)
        self.hooks: Hooks | None
        self.hooks, self.link = booted or (None, new_link(settings, orders.unit))
        self.fetcher = Fetcher(self.link, self.keys, self.unit, self.token)
        self.settler = Settler(self.link, self.keys, self.unit, self.token, slot)
        self.delivery = Delivery(orders.unit, settings.daemon.instance, orders.epoch, slot.beat)
        self.suspects = orders.suspects
        self.gate = ControlChannel(slot, control, self.settler.try_to_flush)
        self.runner = Runner(consumer, self.delivery, slot, self.gate, self.settler)
        self.session = ""  # of the present connection
        self.solo = Quarantine(self, self._run_script)
        self.takeover = Reclaim(self, self._run_script)
        batch_max = 1 if orders.cautious else consumer.prefetch_max
        self.appetite = PrefetchController(
            consumer, settings.daemon.max_message_bytes, batch_max, consumer.prefetch_max
        )
        self.trouble = logs.Episode("worker.stalled", "worker.resumed")
        self._bad = logs.bad_values()
        self.reconnect_wait = 0.0  # 0 = the last round was completed
        self.last_main = b"0-0"
        self.last_retry = b"0-0"
        self._listed = False  # all that was pending has been read since the connection was opened

    def run(self) -> int:
        """Live until stopped. Returns the exit code."""
        self.slot.state = WorkerState.BOOTING
        try:
            self._boot()
        except HandlerLoadError as error:
            logs.event("worker.boot_failed", logging.ERROR, unit=self.unit, error=str(error))
            self.gate.fail(str(error))
            return ExitCode.BOOT_FAILED
        family.end_child()  # `on_start` may fork too
        self.slot.state = WorkerState.READY
        self.gate.ring()
        try:
            code = self._work()
        except Stop as stop:
            code = stop.code
        finally:
            family.end_child()
            self.solo.rest()
        if code is not ExitCode.FENCED:
            try:
                self.settler.flush_last()
            except Fenced:
                code = self._superseded()
            except (RedisUnavailable, RedisRefused):
                pass  # what stays unsettled is in the slot, the supervisor acknowledges it
        if code is ExitCode.RECYCLE:
            self.slot.add("recycled")
        self.runner.publish()
        # From here on the slot may be a successor's: nothing is in hand, nothing is written.
        self.slot.state = WorkerState.QUIET
        self.gate.ring()
        if self.hooks is not None:
            self.hooks.stop()
        return code

    def _boot(self) -> None:
        hooks = self.hooks = self.hooks or boot(self.settings, self.consumer, self.unit)
        self.runner = self._make_runner(hooks)
        self.runner.guards = Guards.of(self.runner, self.settings)
        self.runner.function = hooks.function
        self.runner.interrupt = hooks.interrupt
        self.runner.redact = hooks.loaded.redact
        self.runner.bytes_max = self.settings.daemon.max_message_bytes
        self.runner.listen_for_soft_limit()

    def _make_runner(self, hooks: Hooks) -> Runner:
        kind = runner_class(self.consumer, hooks.loaded.form)
        if kind is Runner:
            return self.runner
        return kind(self.consumer, self.delivery, self.slot, self.gate, self.settler)

    def _work(self) -> ExitCode:
        """Serve for ever; every trouble with the connection leads back to attach."""
        IdleReason(self.slot.words).reset()
        while True:
            try:
                self.gate.sleep(self.reconnect_wait * (1 + random()))
                self._attach()
                self._serve()
            except Fenced:
                return self._superseded()
            except Reconnect:
                self.link.close()
            except (RedisUnavailable, RedisRefused) as error:
                if isinstance(error, RedisRefused) and error.kind is RefusalKind.NO_GROUP:
                    if not self._group_restored():
                        return ExitCode.NO_GROUP
                    self.link.close()
                    continue
                self._failed(error)

    def _failed(self, error: RedisUnavailable | RedisRefused) -> None:
        """Begin with a new connection, after a wait that grows."""
        self.slot.add("redis_errors")
        self.trouble.failed(unit=self.unit, error=str(error))
        self.link.close()
        first, longest = RECONNECT_SECONDS
        self.reconnect_wait = min(max(first, self.reconnect_wait * 2), longest)

    def _group_restored(self) -> bool:
        """Make the group again that somebody has destroyed, where it was. False: nobody knows.

        Then it begins at its floor: what was pending had not been listed, or was given back, and
        none of it may be skipped. Without an answer it is said again: it may not have been heard,
        and then what was acknowledged would be handled once more.
        """
        if not self._listed or self.runner.released:
            return False
        reply = None
        while reply is None:
            in_hand = {*self.slot.unsettled(), *self.settler.parked_places, *self.runner.places()}
            call = messages.restore_group(
                self.keys, self.unit, self.token, self.last_main, self.last_retry, sorted(in_hand)
            )
            try:
                reply = self.link.run(call)
            except RedisUnavailable as error:
                self._failed(error)
                self.gate.sleep(self.reconnect_wait * (1 + random()))
            except RedisRefused:
                return False
        if reply.word != "OK":
            return False  # what follows finds out who has it now
        self.slot.add("round_trips")
        logs.event(
            "group.restored",
            logging.WARNING,
            unit=self.unit,
            after=reply.rest[0].decode() or None,
            retries_after=reply.rest[1].decode() or None,
            in_hand=len(in_hand),
        )
        return True

    def _superseded(self) -> ExitCode:
        """Say that a newer owner exists; everything in hand is its business now."""
        self.slot.add("fenced")
        logs.event("fenced", logging.WARNING, unit=self.unit, epoch=self.delivery.epoch)
        return ExitCode.FENCED

    # --- attach: what is pending comes first ---

    def _attach(self) -> None:
        """Open a session, then handle every pending entry, oldest first, before any fetch.

        Each new connection starts here: a read of an older one that executes late is refused,
        because the session was written into the fence, or its entries are in these lists.
        """
        self._listed = False
        self.settler.flush()
        self.runner.read_clock(self.link)
        session = self.session = secrets.token_hex(8)
        after = {False: b"", True: b""}
        opened = over = False
        while not over:
            count = min(RECOVER_PAGE, self.appetite.count, self._await_room())
            call = messages.recover(
                self.keys,
                self.unit,
                self.token,
                session,
                open=not opened,
                after_main=after[False],
                after_retry=after[True],
                count=count,
            )
            page = messages.Recovered.parse(self._run_script(call), self.keys.attempts(*self.unit))
            if page.bad:
                self._bad.values(page.bad)
            opened = True
            self.last_main, self.last_retry = page.last_main, page.last_retry
            held, over = in_order(page)
            for entry in held:
                after[entry.retried] = entry.id
            self._run_held(held, session if page.solo else "")
            self.settler.flush()
        if page.solo:
            self.solo.end(session)
        self.runner.mark = None
        self._listed = True
        if not self.fetcher.watch():
            raise Fenced

    def _run_held(self, held: list[PendingEntry], session: str) -> None:
        """Handle entries that were pending before. With a session each gets a durable mark."""
        self.runner.mark = self.solo.marker(session) if session else None
        known = {*self.settler.parked_places, *self.runner.places()}
        held = [entry for entry in held if entry.place not in known]
        if not held:
            return
        self._post([entry.place for entry in held])
        began = now_ns()
        for index, entry in enumerate(held):
            self.gate.check(len(held) - index)
            if entry.fields is None:
                self.runner.settle_ghost(index, entry)
                continue
            message = entry.message(self.delivery)
            if self.runner.bury_crasher(index, message, entry):
                continue
            alone = session or entry.crashes or entry.place in self.suspects
            if alone:
                self.runner.finish()
            if session:
                self.solo.begin(session, entry, message)
            self.runner.handle(index, message, entry.retried, entry.crashes, entry.failures > 0)
            if alone:
                self.runner.finish()
                self.solo.rest()
        self.runner.finish()
        self.appetite.fed(len(held), sum(entry.size for entry in held), now_ns() - began)
        self.runner.publish()

    # --- serve: fetch rounds ---

    def _serve(self) -> None:
        idle_since = 0
        while True:
            self.gate.check()
            if self.runner.released:
                self._begin_anew()
                continue
            if not self.settler.only_plain_acks:
                # Verdicts first: only plain acknowledgements ride on a read.
                self.settler.flush_verdicts()
            if self.takeover.has_turn():
                self._reclaim()
                idle_since = 0
                continue
            fetched = self._round(doorbell=bool(idle_since) and not self.settler.acks_owed)
            if fetched.retried or fetched.main:
                idle_since = 0
                self._run_fetched(fetched)
                continue
            self.runner.publish()
            logs.flush()
            now = now_ns()
            idle_since = idle_since or now
            if now - idle_since > IDLE_CHECK_SECONDS * 1e9:
                idle_since = now
                if self.settler.pending_differs():
                    self._attach()

    def _begin_anew(self) -> None:
        """Wait a little, and begin with the oldest pending entry, because some were given back."""
        self.settler.flush()
        self.runner.released = 0
        self.gate.sleep(RELEASE_SECONDS)
        self._attach()

    def _await_room(self) -> int:
        """Return how many more entries may come into hand, 1 at least.

        Waits while Redis refuses to take those that are there; acknowledgements go out meanwhile,
        so that memory can be freed.
        """
        while (room := self.consumer.prefetch_max - len(self.settler.items)) <= 0:
            self.settler.flush()
            if self.settler.items:
                self.gate.sleep(0.2)
        return min(room, self.appetite.batch_max)

    def _round(self, *, doorbell: bool) -> FetchResult:
        """Do one round trip: acknowledge, read, and learn whether the fence is still ours."""
        settler = self.settler
        room = self._await_room()
        bell, seconds = b"", 0.0
        if doorbell:
            seconds = self._bell_seconds()
            bell = self.fetcher.doorbell(self.last_retry, self.last_main, seconds)
        count = min(self.appetite.count, room)
        self.fetcher.send_round(settler.main_acks, settler.retry_acks, count, bell)
        self.slot.add("round_trips")  # not behind the answer, which may have rung the bell
        self._meanwhile()
        if doorbell:
            self._await_bell(seconds)
        fetched = self.fetcher.receive_round(rang=doorbell)
        if fetched.executed and settler.acks_owed:
            settler.acks_confirmed(now_ns())
        return self._accepted(fetched, count)

    def _await_bell(self, seconds: float) -> None:
        """Wait for the answer to a doorbell that lasts so many seconds.

        Raises Anew when the supervisor wants something, Stop, RedisUnavailable.
        """
        sock, bells = self.fetcher.sock, Bells(self.slot.words)
        bells.begin(now_ns(), self.last_retry, self.last_main)
        silence = self._silence(seconds)
        try:
            while (heard := self.gate.await_reply(sock.fileno(), silence.left())) is Heard.NOTHING:
                silence.judge(sock)
            if heard is Heard.ORDER:
                # A blocked round is left by closing the connection: whatever a racing EXEC moved
                # stays pending for the next owner, or for our own next session.
                missed = bells.is_missed
                self.link.close()
                self.gate.check()
                raise unheard() if missed else Reconnect
        except TimeoutError as error:
            raise RedisUnavailable(f"no answer from Redis: {error}", sent=True) from error
        finally:
            bells.end()
        silence.end()

    def _silence(self, seconds: float) -> Silence:
        """The silence of a doorbell, which may last so many seconds."""
        assert self.link.doubt is not None
        return self.link.doubt.silence(time.monotonic() + seconds, REPLY_SECONDS)

    def _meanwhile(self) -> None:
        """What is done while Redis answers. It must not add to what is acknowledged."""

    def _bell_seconds(self) -> float:
        """How long a doorbell waits. What a full server refused is tried again soon."""
        return PARK_SECONDS if self.settler.items else BLOCK_SECONDS

    def _accepted(self, fetched: FetchResult, count: int) -> FetchResult:
        """Judge the answer of a read of `count`. Raises Fenced, RedisRefused."""
        if not fetched.mine:
            raise Fenced
        if fetched.error == "OOM":
            fetched = self._read_when_full(count)
        elif fetched.error:
            raise RedisRefused(fetched.error, f"reading {self.unit} was refused: {fetched.error}")
        # What it rang for has been read, by us or by a foreign consumer: it must not ring again.
        retry, main = fetched.rung
        self.last_retry, self.last_main = retry or self.last_retry, main or self.last_main
        if self.reconnect_wait:
            self.reconnect_wait = 0.0
            self.trouble.recovered(unit=self.unit)
        return fetched

    def _read_when_full(self, count: int) -> FetchResult:
        """Settle and read by scripts: most servers queue nothing while their memory is full."""
        self.settler.flush()
        share = max(1, count * items.BYTES_MAX // self.consumer.prefetch_bytes)
        call = messages.fetch(self.keys, self.unit, self.token, self.session, min(count, share))
        retried, main = self._run_script(call).rest
        received = sum(sum(map(len, fields)) for _, fields in retried + main)
        return FetchResult(True, True, 0, retried, main, "", received)

    def _run_fetched(self, fetched: FetchResult) -> None:
        """Handle one fetched batch: the retry stream's entries, then the partition's."""
        retried, main, received = fetched.retried, fetched.main, fetched.received
        if retried:
            self.last_retry = retried[-1][0]
        if main:
            self.last_main = main[-1][0]
        places = [b"r:" + entry[0] for entry in retried]
        places += [b"m:" + entry[0] for entry in main]
        self._post(places)
        total = len(places)
        self.slot.add("fetched", total)
        size = bytes_of(retried or main, total)
        self.slot.add("bytes", size)
        began = now_ns()
        for first, was_retried, entries in ((0, True, retried), (len(retried), False, main)):
            if entries:
                self.gate.check(total - first)
                self.runner.handle_read(entries, first, was_retried, received)
        self.runner.finish()
        now = now_ns()
        self.appetite.fed(total, size, now - began, received)
        self.runner.publish()
        if self.runner.clock_is_old(now):
            self.runner.read_clock(self.link)

    def _post(self, places: list[bytes]) -> None:
        """Write the batch into the scoreboard, with the parked entries behind it."""
        self.runner.begin()
        self.slot.post_batch(places + self.settler.parked_places)
        self.settler.renumber_parked(len(places))

    # --- what others left behind ---

    def _reclaim(self) -> None:
        """Take over from foreign consumers, as far as a page goes."""
        self.settler.flush()
        for retried in self.takeover.turn():
            count = min(RECOVER_PAGE, self.appetite.count, self._await_room())
            held = self.takeover.take(retried, count)
            if held:
                self._run_held(held, "")
                self.settler.flush()

    def _run_script(self, call: Call) -> Reply:
        reply = self.link.run(call)
        self.slot.add("round_trips")
        if reply.word == "FENCED":
            raise Fenced
        if reply.word == "SESSION":
            # A copy of an earlier recover has come late. The unit is still ours.
            raise RedisUnavailable("the session is not the last one opened", sent=True)
        return reply


def unheard() -> SilentConnection:
    """The housekeeper has found an entry of which the doorbell should have told."""
    return SilentConnection(
        "the connection is silent: a message came, and it was not told", sent=True
    )
