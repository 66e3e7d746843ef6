"""Recovery: run the pending entries, oldest first, before any new entry is read.

Entries may be pending because an owner has crashed, a connection was lost, a handler released them,
or another client left them. Messages that may have crashed a process run in rounds, and so do the
entries of a lost owner, to find the message that causes crashes.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from operator import attrgetter

from streamqd import logs
from streamqd.message import Message
from streamqd.policy import rounds
from streamqd.policy.rounds import Suspects
from streamqd.scoreboard import WAITING, WORD_COMMAND, now_ns
from streamqd.store import messages
from streamqd.worker.entry import NOWHERE, FetchedEntry
from streamqd.worker.quarantine import Quarantine
from streamqd.worker.reclaim import Reclaim
from streamqd.worker.turns import Turns

RECOVER_PAGE = 64  # largest number of pending entries that are listed at a time
_size = attrgetter("size")


class Recovery:
    """Runs the pending entries of one assignment. Only the main thread may use it."""

    def __init__(
        self, turns: Turns, quarantine: Quarantine, suspects: Suspects, *, complete: bool
    ) -> None:
        """Create the recovery of one worker.

        `suspects` holds the messages that may have crashed earlier processes. They run before all
        other entries. If `complete` is true, no other inherited entry can have caused a crash, so
        only the suspects are marked while they run.
        """
        context = self._context = turns.context
        self._slot, self._settler, self._consumer = context.slot, context.settler, context.consumer
        self._reader = turns.reader
        self._executor = turns.executor
        self._turns = turns
        self._quarantine = quarantine
        self._suspects, self._complete = suspects, complete
        self._bad_values = logs.bad_values()

    def run_all(self) -> None:
        """Run every pending entry, oldest first. Call this first on each new connection.

        This also opens a new session, which makes Redis refuse late reads from older connections.
        If Redis executes such a read before it opens the session, this method finds the entries of
        that read. Raises Stop, and the errors of `FencedCalls.run`.
        """
        self._quarantine.open("")
        self._executor.drop_unstarted()
        self._settler.flush()
        self._context.clock.read(self._reader.link)
        self._reader.session = secrets.token_hex(8)
        suspected = bool(self._suspects or self._complete)
        if suspected:
            self._run_suspects()  # also opens the session
        self._run_others(opened=suspected)
        self._quarantine.end()
        self._suspects, self._complete = {}, False
        self._slot.suspects_left = 0

    def end_turn(self) -> None:
        """Give up the worker's turn in quarantine (see `quarantine`), because the worker exits."""
        self._quarantine.end_turn()

    def take_over(self, reclaim: Reclaim) -> None:
        """Take over and run entries of other clients, up to one page from each stream."""
        self._settler.flush()
        for retried in reclaim.pages():
            found = reclaim.take_page(retried, self._reader.session, self._page())
            if found:
                self._run_pending(found)
                self._settler.flush()

    def _pages(self, *, opened: bool = False) -> Iterator[list[messages.PendingEntry]]:
        """List the pending entries page by page, oldest first.

        `opened` must be true if the session was already opened by an earlier call.
        """
        reader, session = self._reader, self._reader.session
        after = {False: b"", True: b""}
        over = False
        while not over:
            call = messages.recover(
                reader.keys,
                self._reader.lease,
                session,
                open=not opened,
                after_main=after[False],
                after_retry=after[True],
                count=self._page(),
            )
            page = messages.Recovered.parse(
                reader.calls.run(call), reader.keys.attempts(*self._context.assignment)
            )
            if page.bad:
                self._bad_values.report_values(page.bad)
            opened = True
            reader.record_last_ids(page.last_retry, page.last_main)
            pending, over = page.entries_in_order()
            for entry in pending:
                after[entry.retried] = entry.id
            self._quarantine.open(session if page.quarantine else "")
            self._quarantine.accused = page.accused
            yield pending

    def _run_others(self, *, opened: bool) -> None:
        """Run all pending entries. In quarantine, they run in rounds of growing size."""
        ready: list[messages.PendingEntry] = []
        listed, most = 0, min(self._quarantine.width, 2)
        for pending in self._pages(opened=opened):
            if not self._quarantine.is_open or self._quarantine.width == 1:
                self._run_pending(pending)
                self._settler.flush()
                continue
            ready += pending
            listed += len(pending)
            self._slot.suspects_left, self._slot.suspects = len(ready), listed
            ready, most = self._run_rounds(ready, most)
        self._run_rounds(ready, most, last=True)

    def _run_suspects(self) -> None:
        """Run the messages that may have crashed earlier processes, in rounds."""
        ready: list[messages.PendingEntry] = []
        missing = len(self._suspects)
        for pending in self._pages():
            # If any entry is accused, it is still unknown which message caused an earlier loss of a
            # host. So all entries that have been pending since then are also suspects.
            if self._quarantine.is_open and (self._quarantine.accused or not self._complete):
                return  # leave all entries to `_run_others`, which marks each of them
            found = [entry for entry in pending if entry.place in self._suspects]
            missing -= len(found)
            ready, _ = self._run_rounds([*ready, *found])
            if not missing:
                break  # `_run_others` lists the other pages
        self._run_rounds(ready, last=True)
        self._quarantine.end()

    def _run_rounds(
        self, ready: list[messages.PendingEntry], most: int = 0, *, last: bool = False
    ) -> tuple[list[messages.PendingEntry], int]:
        """Run listed entries in rounds, as far as there are enough entries for a round.

        `most` is the largest round that an entry may join if it is not a suspect, and it grows with
        each round. It is 0 if all entries are suspects. A round starts when `most` entries or
        `prefetch_bytes` bytes are ready, or with any number of entries if `last` is true. Return
        the entries that are left, and the next value of `most`.
        """
        while ready and (
            last
            or 0 < most <= len(ready)
            or sum(map(_size, ready)) >= self._consumer.prefetch_bytes
        ):
            ready = self._run_round(ready, most)
            most = min(self._quarantine.width, 4 * most)
        return ready, most

    def _run_round(
        self, ready: list[messages.PendingEntry], most: int
    ) -> list[messages.PendingEntry]:
        """Run the next round while nothing else is running. Return the entries that are left."""
        alone = self._quarantine.accused
        largest = [
            1 if each.crashes or each.place in alone else self._suspects.get(each.place, most)
            for each in ready
        ]
        count = rounds.next_round(largest)
        if self._turns.guards is not None and self._turns.guards.one_by_one:
            count = 1
        self._turns.run_alone()
        self._slot.round_size = count
        if not self._quarantine.is_open:
            self._run_pending(ready[:count])
        elif members := self._runnable(ready[:count]):
            self._run_marked(members)
        self._turns.run_alone()
        self._settler.flush()
        self._turns.await_capacity()
        self._slot.round_size = 0
        self._slot.suspects_left = max(1, self._slot.suspects_left - count)
        return ready[count:]

    def _run_pending(self, found: list[messages.PendingEntry]) -> None:
        """Run pending entries together, except those that must run alone.

        An entry that was charged with a crash runs alone. In quarantine, all entries run alone,
        each with a turn and a mark in Redis.
        """
        executor, together = self._executor, list[FetchedEntry]()
        for entry in self._runnable(found):
            if not (entry.crashes or self._quarantine.is_open):
                together.append(entry)
                continue
            self._run_alone(together)
            together = []
            if self._quarantine.is_open:
                self._run_marked([entry])
            else:
                self._run_alone([entry])
        if together:
            executor.admit(together)
            self._turns.advance()
        self._turns.await_capacity()

    def _run_alone(self, entries: list[FetchedEntry]) -> None:
        """Finish all entries in flight, then run these entries while nothing else is running."""
        self._turns.run_alone()
        if entries:
            self._executor.admit(entries)
            self._turns.run_alone()

    def _runnable(self, found: list[messages.PendingEntry]) -> list[FetchedEntry]:
        """Return the entries that must run, and settle those that cannot run.

        The latter were trimmed, are too large or have crashed too often. Entries that the executor
        or the settler already holds are left out.
        """
        known = {*self._settler.deferred_places, *self._executor.places}
        runnable = []
        for entry in found:
            if entry.place in known:
                continue
            self._turns.follow_command()
            if entry.fields is None:
                self._turns.verdicts.acknowledge_missing(entry)
                continue
            message = self._message(entry)
            fetched = FetchedEntry(
                NOWHERE, entry.place, message, entry.retried, entry.crashes, entry.size
            )
            if not self._turns.verdicts.dead_letter_unrunnable(fetched, entry.context):
                runnable.append(fetched)
        return runnable

    def _message(self, entry: messages.PendingEntry) -> Message:
        delivery, fields = self._context.delivery, entry.fields or []
        message = Message(delivery, entry.id, fields, retried=entry.retried)
        if entry.failures:
            message.failures_in_place = entry.failures
        if entry.wait_ms:
            message.due_in_place_ns = now_ns() + entry.wait_ms * 1_000_000
        return message

    def _run_marked(self, entries: list[FetchedEntry]) -> None:
        """Run entries under one mark that lists them all, while no other message is running.

        The turn lasts as long as any is running. If a gate delays the others so that none
        is running, the remaining entries get a new turn and a new mark.
        """
        executor, states = self._executor, self._slot.states
        self._turns.run_alone()
        executor.admit(entries)
        while left := [each for each in entries if states[each.index] == WAITING]:
            self._quarantine.begin(*left)
            executor.start(held=False)
            while executor.in_flight.running:
                self._turns.settle_next_finished(held=False)
                if not self._slot.words[WORD_COMMAND]:
                    executor.start(held=False)
            self._turns.check_message_limit()
            if not executor.in_flight.entries:
                break
        self._quarantine.end_turn()
        self._turns.run_alone()

    def _page(self) -> int:
        """Return how many pending entries may be listed next. Waits like `Turns.await_room`."""
        return min(RECOVER_PAGE, self._turns.prefetch.count, self._turns.await_room())
