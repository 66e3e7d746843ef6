"""The worker that handles several messages of its partition at once.

The main thread fetches, gives entries to lanes, and settles what has ended, each entry by itself.
It never waits for one handler: a read that waits for new entries, and the settling of old ones, go
over connections of their own, so nothing stands behind anything.
"""

from __future__ import annotations

import contextlib
from typing import Any

from streamqd.bells import Bells
from streamqd.errors import HandlerLoadError, RedisUnavailable
from streamqd.message import of_read
from streamqd.model import HOLD_KEY
from streamqd.scoreboard import WORD_COMMAND, now_ns
from streamqd.store.cluster import connect
from streamqd.store.doubt import Silence
from streamqd.store.fetch import FetchResult
from streamqd.worker.assignment import Reconnect
from streamqd.worker.control_channel import ExitCode, Stop
from streamqd.worker.hooks import Hooks
from streamqd.worker.lanes import RunningMessage, Runs, TaskRuns, ThreadRuns
from streamqd.worker.pending_entry import PendingEntry
from streamqd.worker.runs import ACK_DELAY_NS, RELEASE_SECONDS, Runner
from streamqd.worker.settler import PARK_SECONDS, Fenced
from streamqd.worker.several import SeveralRunner
from streamqd.worker.several_holding import HoldingSeveralRunner
from streamqd.worker.worker import (
    BLOCK_SECONDS,
    DOUBT_SECONDS,
    IDLE_CHECK_SECONDS,
    REPLY_SECONDS,
    WorkerProcess,
    unheard,
)

PUBLISH_NS = 1_000_000_000


class ConcurrentWorker(WorkerProcess):
    """Handles one unit, `concurrency` messages at a time."""

    runner: SeveralRunner

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        name = f"streamqd:{self.unit}:settle"
        self.settler.link = connect(
            self.settings.redis,
            timeout=REPLY_SECONDS,
            name=name,
            key=self.keys.fence(*self.unit),
            doubt=DOUBT_SECONDS,
        )
        self._bells = Bells(self.slot.words)
        self._bell_ns = 0  # when the doorbell was sent that is not answered yet
        self._silent: Silence | None = None  # since then
        self._bell_count = 0
        self._published_ns = 0
        self._idle_since = 0

    def _make_runner(self, hooks: Hooks) -> Runner:
        form, function = hooks.loaded.form, hooks.loaded.function
        if form.batch:
            raise HandlerLoadError(
                f"{self.consumer.handler} takes batches, which are handled one at a time: remove "
                "concurrency, or write it for one message"
            )
        kind = HoldingSeveralRunner if self.consumer.on_error == HOLD_KEY else SeveralRunner
        runner = kind(self.consumer, self.delivery, self.slot, self.gate, self.settler)
        lanes: Runs
        if form.asynchronous:
            assert hooks.loop is not None
            limited = self.consumer.timeout is not None
            lanes = TaskRuns(self.slot, function, hooks.loop, limited=limited)
        else:
            lanes = ThreadRuns(self.slot, function, self.consumer.lanes)
        runner.lanes = lanes
        return runner

    def run(self) -> int:
        """Live until stopped. Returns the exit code."""
        try:
            return super().run()
        finally:
            if isinstance(self.runner, SeveralRunner):
                self.runner.lanes.close()
            self.settler.link.close()

    def _work(self) -> ExitCode:
        try:
            return super()._work()
        finally:
            self._finish_running(whatever=True)

    # --- attach ---

    def _attach(self) -> None:
        self._bell_ns = 0
        self._silent = None
        self._bells.end()
        self.runner.mark = None
        self.runner.alone = False
        self.runner.collect()
        self.runner.forget_waiting()
        super()._attach()

    def _run_held(self, held: list[PendingEntry], session: str) -> None:
        """Take entries that were pending before into hand, and handle those that must be alone."""
        self.runner.mark = self.solo.marker(session) if session else None
        known = {*self.runner.places(), *self.settler.parked_places}
        for entry in held:
            if entry.place in known:
                continue
            self._obey()
            index = self.runner.admit(entry.place)
            if entry.fields is None:
                self.runner.settle_ghost(index, entry)
                continue
            message = entry.message(self.delivery)
            self.runner.may_expire |= message.expires_at is not None
            if self.runner.bury_crasher(index, message, entry):
                continue
            alone = session or entry.crashes or entry.place in self.suspects
            if alone:
                self._run_dry()
            if session:
                self.solo.begin(session, entry, message)
            self.runner.add(
                RunningMessage(
                    index, entry.place, message, entry.retried, entry.crashes, entry.size
                )
            )
            if session:
                self._run_marked()
            if alone:
                self._run_dry()
        while self._is_full():
            self._advance()
            self._wait()

    # --- serve ---

    def _serve(self) -> None:
        empty = False
        while True:
            self._look()
            ahead = not empty and self._may_read_ahead()
            fetched = self._round(doorbell=False) if ahead else self._turn(empty)
            if fetched is not None:
                empty = not (fetched.retried or fetched.main)
                self._take(fetched)

    def _turn(self, empty: bool) -> FetchResult | None:
        """Begin with what can begin, then do what is next. Returns what was read.

        `empty`: the read before has brought nothing.
        """
        self._go_on()
        if self.runner.released:
            self._begin_anew()
        elif self.takeover.wanted and self.takeover.has_turn(reading=self._hungry()):
            if self._bell_ns:
                raise Reconnect  # the bell keeps the connection for seconds
            self._reclaim()
        elif self._bell_ns:
            return self._answer()
        elif not (self._hungry() or self._overdue_may_ride()):
            self._wait()
        elif empty and not (self._overdue() or self.takeover.wanted):
            self._ring()
        else:
            return self._round(doorbell=False)
        return None

    def _may_read_ahead(self) -> bool:
        """Whether to read before what can begin does, which then runs while Redis answers."""
        runner, busy = self.runner, self._bell_ns or self.takeover.wanted
        if busy or runner.released or runner.ack_each or not self.settler.only_plain_acks:
            return False
        return runner.about_to_begin > 0 and self._hungry()

    def _meanwhile(self) -> None:
        if self.runner.about_to_begin:
            self.runner.start_ready()

    def _advance(self) -> None:
        """Obey, note what has ended, begin with what can begin, settle what is due."""
        self._look()
        self._go_on()

    def _look(self) -> None:
        """Obey, and note what has ended."""
        self._obey()
        self.runner.collect()
        if self.runner.spent:
            raise Stop(ExitCode.RECYCLE)
        guards = self.runner.guards
        if guards is not None and guards.flooded:
            self._finish_running(whatever=True)
            guards.heed(more=False)
        now = now_ns()
        if now - self._published_ns > PUBLISH_NS:
            self._published_ns = now
            self.runner.publish()

    def _go_on(self) -> None:
        """Begin with what can begin, and settle what is due."""
        if self.runner.ack_each and self.settler.since_ns:
            self.settler.flush()
        self.runner.start_ready()
        if self._overdue():
            if not self._overdue_may_ride():
                self.settler.flush()
        elif self.settler.items and not self.settler.since_ns:
            self.settler.flush_verdicts()

    def _obey(self) -> None:
        """When the supervisor wants a stop or a pause, begin nothing and let the runs end."""
        if not self.slot.words[WORD_COMMAND]:
            return
        self._finish_running()
        rang = self._bell_ns
        self.gate.check(self.runner.ordering.waiting)
        if rang:
            # Whatever the doorbell's read has moved meanwhile is found by listing.
            raise Reconnect

    def _finish_running(self, *, whatever: bool = False) -> None:
        """Wait for the runs to end, as long as a command stands, or `whatever` is commanded."""
        while self.runner_is_busy and (whatever or self.slot.words[WORD_COMMAND]):
            self._wait()
            self.runner.collect()
            with contextlib.suppress(Fenced):
                self.settler.try_to_flush()

    @property
    def runner_is_busy(self) -> bool:
        """Whether handlers run. None does before the boot is over."""
        return isinstance(self.runner, SeveralRunner) and bool(self.runner.running)

    def _run_marked(self) -> None:
        """Run what is in hand. Nothing is raised meanwhile: the turn lasts as long as the run."""
        self.runner.alone = True
        self.runner.start_ready()
        self._finish_running(whatever=True)
        self.solo.rest()

    def _run_dry(self) -> None:
        """Handle all that is in hand."""
        self.runner.alone = True
        while True:
            self._advance()
            if not (self.runner.running or self.runner.ordering.waiting):
                break
            if self.runner.running or self.runner.throttled:
                self._wait()
        self.runner.collect()
        self.runner.alone = False

    def _begin_anew(self) -> None:
        self._run_dry()
        self.settler.flush()
        self.runner.released = 0
        self.gate.sleep(RELEASE_SECONDS)
        if self._bell_ns:
            raise Reconnect
        self._attach()

    # --- reading ---

    def _hungry(self) -> bool:
        """Whether more entries should come into hand: lanes will want them, and there is room."""
        return self.runner.wants(self.consumer.lanes) and not self._is_full()

    def _overdue(self) -> bool:
        """Whether something has waited for its settlement for long enough."""
        since = self.settler.since_ns
        return since > 0 and now_ns() - since > ACK_DELAY_NS

    def _overdue_may_ride(self) -> bool:
        """Whether all that is overdue are acknowledgements, and a read may take them along now.

        What it brings nobody has asked for: it must not add to more than one read should bring.
        """
        return (
            self._overdue()
            and self.settler.only_plain_acks
            and not (self._bell_ns or self.runner.alone or self._is_full())
            and self.runner.wants(max(self.appetite.count, self.consumer.lanes))
        )

    def _is_full(self) -> bool:
        """Whether nothing more may come into hand, by number or by bytes."""
        runner = self.runner
        return runner.is_full() or runner.bytes_in_hand >= self.consumer.prefetch_bytes

    def _await_room(self) -> int:
        room = super()._await_room()
        runner = self.runner
        # A read may bring twice as many.
        return max(1, min(room, runner.room, runner.free_indexes // 2))

    def _ring(self) -> None:
        """Send a read that waits for new entries. No acknowledgement rides on it: it may wait."""
        seconds = self._bell_seconds()
        bell = self.fetcher.doorbell(self.last_retry, self.last_main, seconds)
        self._bell_count = min(self.appetite.count, self._await_room())
        self.fetcher.send_round([], [], self._bell_count, bell)
        self._bell_ns = now_ns()
        self._bells.begin(self._bell_ns, self.last_retry, self.last_main)
        self._silent = self._silence(seconds)

    def _answer(self) -> FetchResult | None:
        """Wait for the doorbell, or for anything else that happens. None: it has not answered."""
        sock, silence = self.fetcher.sock, self._silent
        assert silence is not None
        if sock.fileno() not in self._wait(sock.fileno()):
            if self._bells.is_missed:
                raise unheard()
            try:
                if not silence.left():
                    silence.judge(sock)
            except TimeoutError as error:
                raise RedisUnavailable(f"no answer from Redis: {error}", sent=True) from error
            return None
        fetched = self.fetcher.receive_round(rang=True)
        silence.end()
        self._bell_ns = 0
        self._silent = None
        self._bells.end()
        self.slot.add("round_trips")
        return self._accepted(fetched, self._bell_count)

    def _take(self, fetched: FetchResult) -> None:
        """Take what was read into hand, or see to what is due when nothing happens."""
        retried, main = fetched.retried, fetched.main
        if not retried and not main:
            self._idle()
            return
        self._idle_since = 0
        size = self._add_read(retried, True) + self._add_read(main, False)
        self.last_retry = retried[-1][0] if retried else self.last_retry
        self.last_main = main[-1][0] if main else self.last_main
        total = len(retried) + len(main)
        self.slot.add("fetched", total)
        self.slot.add("bytes", size)
        spent = int(self.runner.run_ns * total / self.consumer.lanes)
        self.appetite.fed(total, size, spent, fetched.received)
        if self.runner.clock_is_old(now_ns()):
            self.runner.read_clock(self.link)

    def _add_read(self, entries: list[Any], retried: bool) -> int:
        """Take the entries that were read of one stream into hand. Returns their size in bytes."""
        if not entries:
            return 0
        runner, bytes_max, prefix = self.runner, self.runner.bytes_max, b"r:" if retried else b"m:"
        messages, may_expire = of_read(self.delivery, entries, retried)
        runner.may_expire |= may_expire
        sizes = [sum(map(len, fields)) for _, fields in entries]
        found = list(zip(messages, sizes, strict=True))
        # A giant is buried at once, which may fail: what is behind it must not be in hand then.
        step = 1 if max(sizes) > bytes_max else len(found)
        for start in range(0, len(found), step):
            part = found[start : start + step]
            places = [prefix + message.id_bytes for message, _ in part]
            indexes = runner.admit_all(places)
            runner.add_all(
                [
                    RunningMessage(index, place, message, retried, 0, size)
                    for index, place, (message, size) in zip(indexes, places, part, strict=True)
                    if size <= bytes_max or not runner.bury_giant(index, message, retried, 0)
                ]
            )
        return sum(sizes)

    def _idle(self) -> None:
        now = now_ns()
        # What a rate, a circuit or a held key lets wait is pending, too.
        if self.runner.running or self.runner.ordering.waiting or self.settler.owed:
            self._idle_since = 0
            return
        self._idle_since = self._idle_since or now
        if now - self._idle_since > IDLE_CHECK_SECONDS * 1e9:
            self._idle_since = now
            if self.settler.pending_differs():
                raise Reconnect

    def _wait(self, *descriptors: int) -> set[int]:
        """Wait until a run has ended, or a descriptor is readable, or settling is due."""
        since = self.settler.since_ns
        seconds = BLOCK_SECONDS
        if since:
            seconds = max(0.0, (since + ACK_DELAY_NS - now_ns()) / 1e9) + 0.001
        elif self.settler.items:
            seconds = PARK_SECONDS
        seconds = self.runner.patience(seconds)
        if descriptors and self._silent is not None:
            seconds = min(seconds, self._silent.left() + 0.001)
        return self.gate.await_any([self.runner.lanes.bell, *descriptors], seconds)
