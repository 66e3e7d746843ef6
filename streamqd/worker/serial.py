"""Run messages one after another, in the main thread.

The slot's batch contains the entries of the last read or listing. When each of them has finished or
is held because an earlier message with its key has failed, the next read is sent, which also
carries their acknowledgments.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from streamqd.message import Message, messages_of_read
from streamqd.model import RawEntry
from streamqd.scoreboard import CLEARED, WORD_COMMAND, now_ns
from streamqd.store.fetch import FetchResult
from streamqd.store.messages import entry_place
from streamqd.worker.context import WorkerContext
from streamqd.worker.entry import FetchedEntry, InFlight
from streamqd.worker.held_keys import HeldKeys
from streamqd.worker.prefetch import PrefetchController, estimate_bytes
from streamqd.worker.verdicts import Verdicts

DUE_MAX = 128  # held messages taken at a time, both in total and per key


class Runner(Protocol):
    """Calls the handler for the entries of the batch, either one by one or many at a time."""

    def run_many(
        self,
        messages: list[Message],
        entries: Sequence[RawEntry],
        start: int,
        first: int,
        retried: bool,
    ) -> int:
        """Run the handler for new messages, starting with `messages[start]`. Return how many ran.

        `entries` holds the entries of the same messages, and `first` is the index of `messages[0]`
        in the batch. If not all messages have run, the caller must pass the next one to `handle`.
        """

    def handle(self, entry: FetchedEntry) -> None:
        """Run the handler for an entry of the batch, or collect the entry for a later call."""

    def run_collected(self) -> None:
        """Run the messages that `handle` has collected, because no more will be added now."""

    def drop_collected(self) -> None:
        """Forget the messages that `handle` has collected. They stay pending in Redis."""


class SerialExecutor:
    """Runs messages one after another. Its worker uses a single connection to Redis."""

    wake_fds: tuple[int, ...] = ()

    def __init__(
        self,
        context: WorkerContext,
        runner: Runner,
        verdicts: Verdicts,
        held: HeldKeys | None,
        prefetch: PrefetchController,
    ) -> None:
        self._context = context
        self._slot = context.slot
        self._settler = context.settler
        self._runner = runner
        self._verdicts = verdicts
        self._held = held
        self._prefetch = prefetch
        self._bytes_max = context.settings.daemon.max_message_bytes
        self._listed: list[FetchedEntry] = []
        self._read: FetchResult | None = None

    # --- intake ---

    def drop_unstarted(self) -> None:
        """Drop the entries that have not started. They stay pending, and are then listed again."""
        self._listed, self._read = [], None
        self._runner.drop_collected()
        if self._held is not None:
            self._held.restart()

    def admit(self, listed: list[FetchedEntry], read: FetchResult | None = None) -> None:
        """Accept either listed or newly read entries. No other entry may be in flight.

        The newly read entries of the retry stream run before those of the partition.
        """
        if read is None:
            self._settler.begin_batch([entry.place for entry in listed])
        else:
            places = [b"r:" + entry[0] for entry in read.retried]
            places += [b"m:" + entry[0] for entry in read.main]
            self._settler.begin_batch(places, read=True)
            self._slot.add("fetched", len(places))
        for index, entry in enumerate(listed):
            entry.index = index
        self._listed, self._read = listed, read

    # --- entries in flight, and room for more ---

    @property
    def in_flight(self) -> InFlight:
        """The number of running and waiting entries.

        No entry counts as startable, because `start` does I/O.
        """
        return InFlight(0, self._slot.unfinished if self._listed or self._read else 0, 0)

    @property
    def places(self) -> Collection[bytes]:
        """The places of the held entries, which the executor keeps after a lost connection."""
        return () if self._held is None else self._held.places

    def room(self, _ready: int | None = None) -> int:
        """Return how many more entries may be fetched from each stream, or 0 for none.

        `_ready` is ignored: fetched entries have either run already or are being held, so none of
        them can be ready.
        """
        if self._held is None:
            return self._context.consumer.prefetch_max
        return 0 if self._held.is_full() else max(1, self._held.room())

    def next_due(self, _now: int, *, held: bool = True) -> int | None:
        """Return when the next held entry is due (`now_ns`), or None if there is none.

        If `held` is false, held entries are ignored, so the result is None.
        """
        return None if self._held is None or not held else self._held.next_due()

    # --- running ---

    def collect_finished(self) -> None:
        """Do nothing, because `start` returns only after all its runs have finished."""

    def start(self, *, held: bool = True) -> None:
        """Run all fetched entries, and if `held` is true, also the held messages that are due.

        Raises Stop if the process must exit, and the errors of `Settler.flush`. In either case,
        entries that have not run stay pending.
        """
        listed, self._listed = self._listed, []
        if listed:
            began = now_ns()
            for entry in listed:
                # Do not check for a command before the first entry. In quarantine, it must run
                # right after its mark was written.
                if entry.index:
                    self._context.channel.check(self._slot.unfinished)
                self._runner.handle(entry)
            self._runner.run_collected()
            size = sum([entry.size for entry in listed])
            self._prefetch.observe(len(listed), size, now_ns() - began)
        fetched, self._read = self._read, None
        if fetched is not None:
            self._run_read(fetched)
        if held and self._held is not None:
            self._run_due(self._held)

    def _run_read(self, fetched: FetchResult) -> None:
        retried, main, began = fetched.retried, fetched.main, now_ns()
        total = len(retried) + len(main)
        size = estimate_bytes(retried or main, total)
        self._slot.add("bytes", size)
        for first, was_retried, entries in ((0, True, retried), (len(retried), False, main)):
            if entries:
                self._context.channel.check(total - first)
                self._run_stream(entries, first, was_retried, fetched.received)
        self._runner.run_collected()
        self._prefetch.observe(total, size, now_ns() - began, fetched.received)

    def _run_stream(
        self, entries: list[RawEntry], first: int, retried: bool, received: int
    ) -> None:
        """Run the entries that were read from one stream.

        `first` is the index of the first one in the batch, and `received` is the size of the whole
        read in bytes.
        """
        context, slot, runner = self._context, self._slot, self._runner
        messages, may_expire = messages_of_read(context.delivery, entries, retried)
        oversized = received > self._bytes_max  # the read may contain oversized entries
        one_by_one = oversized or may_expire
        position = 0
        while position < len(messages):
            if slot.words[WORD_COMMAND]:
                context.channel.check(slot.unfinished)
            ran = 0
            if not one_by_one:
                ran = runner.run_many(messages, entries, position, first, retried)
            if not ran:
                message = messages[position]
                place = entry_place(message.id_bytes, retried=retried)
                entry = FetchedEntry(first + position, place, message, retried)
                if not oversized or not self._verdicts.dead_letter_oversized(entry):
                    runner.handle(entry)
            position += ran or 1

    def _run_due(self, held: HeldKeys) -> None:
        """Run the held messages of the keys that are due. Stop a key at the first one that fails.

        Keys that become due in the meantime wait until after the next read, so that a key that
        fails again and again cannot starve other keys.
        """
        lines: list[list[FetchedEntry]] = []
        count = 0
        while count < DUE_MAX and (line := held.take(DUE_MAX)):
            lines.append(line)
            count += len(line)
        if not lines:
            return
        self._settler.flush()
        self._settler.begin_batch([kept.place for line in lines for kept in line])
        first = 0
        for line in lines:
            self._run_key(held, line, first)
            first += len(line)
        self._settler.flush()

    def _run_key(self, held: HeldKeys, line: list[FetchedEntry], first: int) -> None:
        """Run the messages of a held key until one of them fails.

        `line` holds the messages, and `first` is the index of the first one in the batch.
        """
        for index, kept in enumerate(line, first):
            self._context.channel.check(self._slot.unfinished)
            kept.index = index
            self._runner.handle(kept)
            if not held.is_done(kept):
                for behind in range(index + 1, first + len(line)):
                    self._slot.states[behind] = CLEARED
                break
        held.reschedule(line[0].key)

    def close(self) -> None:
        """Do nothing, because there are no resources to release."""
