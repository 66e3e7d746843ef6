"""Messages one after the other: what comes into hand runs at once, in the main thread.

The slot's batch is what was read last, or listed. All of it has ended, or is kept by its order,
before the next read is sent; acknowledgements ride on that read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from streamqd.message import Entry, Message, of_read
from streamqd.scoreboard import CLEARED, WORD_COMMAND, now_ns
from streamqd.store.fetch import FetchResult
from streamqd.store.messages import place_of
from streamqd.worker.context import WorkerContext
from streamqd.worker.entry import FetchedEntry
from streamqd.worker.held_keys import HeldKeys
from streamqd.worker.prefetch import bytes_of
from streamqd.worker.verdicts import Verdicts

DUE_MAX = 128  # held messages that come into hand at once, and of one key


class Runner(Protocol):
    """Calls the handler for the entries of the batch: one by one, or many at once."""

    def begin(self) -> None:
        """Entries of a new read, or list, have come; those of the one before are forgotten."""

    def run_many(self, messages: list[Message], start: int, first: int, retried: bool) -> int:
        """Run the handler for messages that came just now, from `start` on.

        The first of them all is at `first` of the batch. Returns how many have run; the next one
        needs its entry, and is for `handle`.
        """

    def handle(self, entry: FetchedEntry) -> None:
        """Run the handler for an entry of the batch, or collect it."""

    @property
    def collected(self) -> int:
        """How many entries wait for their run."""

    def finish(self) -> None:
        """Run what was collected."""


class SerialExecutor:
    """Runs messages as they come, over the one connection of its worker."""

    inline = True  # it runs handlers inside the loop of the worker
    wake_fds: tuple[int, ...] = ()
    running = 0
    about_to_begin = 0
    throttled = 0.0

    def __init__(
        self,
        context: WorkerContext,
        runner: Runner,
        verdicts: Verdicts,
        held: HeldKeys | None,
    ) -> None:
        self.alone = False
        self._context = context
        self._slot = context.slot
        self._settler = context.settler
        self._runner = runner
        self._verdicts = verdicts
        self._held = held
        self._bytes_max = context.settings.daemon.max_message_bytes

    # --- what comes ---

    def restart(self) -> None:
        """Begin with a list of what is pending: no entry is left but those held."""
        self.alone = False
        if self._held is not None:
            self._held.restart()

    def expect(self, places: list[bytes], *, read: bool = False) -> None:
        """Write a new batch into the slot. `read`: one read brought all of it."""
        self._runner.begin()
        self._settler.begin_batch(places, read=read)

    def admit(self, position: int, _place: bytes) -> int:
        """Return the index in the slot of an entry that was expected."""
        return position

    def add(self, entry: FetchedEntry) -> None:
        """Handle an entry that was pending before."""
        self._runner.handle(entry)

    def finish(self) -> None:
        """Run what was only collected: no more comes for now."""
        self._runner.finish()

    def take(self, fetched: FetchResult) -> tuple[int, int]:
        """Handle what was read: the retry stream's entries, then the partition's.

        Returns its bytes, about, and the nanoseconds that it took.
        """
        retried, main = fetched.retried, fetched.main
        places = [b"r:" + entry[0] for entry in retried]
        places += [b"m:" + entry[0] for entry in main]
        self.expect(places, read=True)
        total = len(places)
        self._slot.add("fetched", total)
        size = bytes_of(retried or main, total)
        self._slot.add("bytes", size)
        began = now_ns()
        for first, was_retried, entries in ((0, True, retried), (len(retried), False, main)):
            if entries:
                self._context.channel.check(total - first)
                self._take_stream(entries, first, was_retried, fetched.received)
        self._runner.finish()
        return size, now_ns() - began

    def _take_stream(self, entries: list[Entry], first: int, retried: bool, received: int) -> None:
        """Handle the entries of one stream. They are at `first` of the batch and after it."""
        context, slot, runner = self._context, self._slot, self._runner
        messages, may_expire = of_read(context.delivery, entries, retried)
        oversized = received > self._bytes_max  # there may be some
        one_by_one = oversized or may_expire
        position = 0
        while position < len(messages):
            if slot.words[WORD_COMMAND]:
                context.channel.check(slot.unfinished)
            ran = 0 if one_by_one else runner.run_many(messages, position, first, retried)
            if not ran:
                message = messages[position]
                place = place_of(message.id_bytes, retried=retried)
                entry = FetchedEntry(first + position, place, message, retried)
                if not oversized or not self._verdicts.dead_letter_oversized(entry):
                    runner.handle(entry)
            position += ran or 1

    # --- running ---

    def collect(self) -> None:
        """Nothing: what has begun has ended."""

    def start_ready(self) -> None:
        """Run what was collected, and the held messages that are due.

        Of each held key those behind the first run too, until one of them fails.
        """
        self._runner.finish()
        if self._held is not None and not self.alone:
            self._run_due(self._held)

    def _run_due(self, held: HeldKeys) -> None:
        """Run the held messages that are due, not too many at once.

        What is due again meanwhile waits until something was read: it must not starve other keys.
        """
        lines: list[list[FetchedEntry]] = []
        count = 0
        while count < DUE_MAX and (line := held.take(DUE_MAX)):
            lines.append(line)
            count += len(line)
        if not lines:
            return
        self._settler.flush()
        self.expect([kept.place for line in lines for kept in line])
        first = 0
        for line in lines:
            self._run_line(held, line, first)
            first += len(line)
        self._settler.flush()

    def _run_line(self, held: HeldKeys, line: list[FetchedEntry], first: int) -> None:
        """Run the messages of a held key, at `first` of the batch and after it, until one fails."""
        for index, kept in enumerate(line, first):
            self._context.channel.check(self._slot.unfinished)
            kept.index = index
            self._runner.handle(kept)
            if not held.is_done(kept):
                for behind in range(index + 1, first + len(line)):
                    self._slot.states[behind] = CLEARED
                break
        held.go_on(line[0].key)

    def settle(self, *, read_follows: bool) -> None:
        """Settle what was not done; acknowledgements alone ride on the read that follows."""
        if not read_follows:
            self._settler.flush()
        elif not self._settler.only_plain_acks:
            self._settler.flush_verdicts()

    @property
    def settling_is_due(self) -> bool:
        """Whether the next read must go out at once, for what rides on it."""
        return self._settler.acks_owed

    # --- what the reader asks ---

    @property
    def busy(self) -> bool:
        """Whether any fetched entry has yet to run."""
        return self._runner.collected > 0

    @property
    def waiting(self) -> int:
        """How many fetched entries have not begun."""
        return self._slot.unfinished

    @property
    def places(self) -> Iterable[bytes]:
        """The places of what stays in hand when the connection is lost."""
        return () if self._held is None else self._held.places

    def wants(self, _count: int) -> bool:
        """Whether more entries should come into hand."""
        return True

    def is_full(self) -> bool:
        """Whether nothing more may come into hand."""
        return self._held is not None and self._held.is_full()

    @property
    def room(self) -> int:
        """How many more entries of each stream may come into hand."""
        return self._context.consumer.prefetch_max if self._held is None else self._held.room()

    def patience(self, seconds: float) -> float:
        """How much of a wait is over before a fetched entry could begin."""
        return seconds if self._held is None else self._held.patience(seconds)

    def close(self) -> None:
        """Give up what it needs: nothing."""
