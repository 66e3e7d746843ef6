"""Read entries in one round trip, and wait for new entries with a long poll.

A read is one round trip (`store.fetch`) that sends acknowledgments, fetches entries, and checks
that the fence still contains the worker's token. If a read has returned no entries, the next one is
sent together with a long poll. The server runs the read after the poll, so the read waits there
until a new entry arrives. The worker's loop decides when to read, and how much.
"""

from __future__ import annotations

import time

from streamqd.errors import RedisResponseError, RedisUnavailableError, SilentConnectionError
from streamqd.long_poll import PollWords
from streamqd.model import Lease
from streamqd.scoreboard import WorkerSlot, now_ns
from streamqd.store import messages
from streamqd.store.client import Connection
from streamqd.store.fetch import Fetcher, FetchResult
from streamqd.store.idle_probe import ReplyWait
from streamqd.store.keys import Keys
from streamqd.worker.fenced import Fenced, FencedCalls

REPLY_SECONDS = 10.0  # longest wait for the answer to a command that does not block


class LongPoll:
    """A long poll, together with the read that the server runs after it.

    Until the answer arrives, the connection cannot be used for anything else. When the server runs
    the read, the entries become pending for this worker, even if the answer is lost.
    """

    def __init__(self, link: Connection, fetcher: Fetcher, words: PollWords) -> None:
        self._idle_probe = link.node.idle_probe
        self._fetcher = fetcher
        self._words = words
        self._wait: ReplyWait | None = None
        self.count = 0  # number of entries per stream that the read may return

    @property
    def is_waiting(self) -> bool:
        """True if a poll was sent and its answer has not been read yet."""
        return self._wait is not None

    def start(self, count: int, retry: bytes, main: bytes, seconds: float) -> None:
        """Send a poll for new entries, and a read of up to `count` entries per stream.

        `retry` and `main` are the IDs in the two streams after which an entry is new. The server
        answers after `seconds` even if there is none. No acknowledgments are sent.
        """
        poll = self._fetcher.long_poll(retry, main, seconds)
        self._fetcher.send_round([], [], count, poll)
        self.count = count
        self._words.begin(now_ns(), retry, main)
        assert self._idle_probe is not None
        self._wait = self._idle_probe.start_wait(time.monotonic() + seconds, REPLY_SECONDS)

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when the answer arrives."""
        return self._fetcher.sock.fileno()

    def seconds_left(self) -> float:
        """Return the number of seconds until `check` must be called."""
        return 0.0 if self._wait is None else self._wait.seconds_left()

    def check(self) -> None:
        """Check that the connection still works, if the poll has not been answered in time.

        Raises RedisUnavailableError if the connection is dead. Raises SilentConnectionError if the
        housekeeper has found an entry that the poll should have reported.
        """
        if self._words.is_missed:
            raise SilentConnectionError(
                "the connection is silent: a message arrived, but Redis did not report it",
                sent=True,
            )
        try:
            if self._wait is not None and not self._wait.seconds_left():
                self._wait.check(self._fetcher.sock)
        except TimeoutError as error:
            raise RedisUnavailableError(f"no answer from Redis: {error}", sent=True) from error

    def answer(self) -> FetchResult:
        """Return the answer. Call this when the file descriptor is readable.

        Raises RedisUnavailableError if the connection is lost.
        """
        fetched = self._fetcher.receive_round(polled=True)
        if self._wait is not None:
            self._wait.record_reply()
        self.abandon()
        return fetched

    def abandon(self) -> None:
        """Record that the worker no longer waits for an answer."""
        self._wait = None
        self._words.end()


class Reader:
    """Reads the entries of one assignment. It starts no handlers and settles no messages.

    It keeps the last ID that the group has read in each stream, from which long polls start, and
    the session of the current connection.
    """

    def __init__(self, link: Connection, keys: Keys, lease: Lease, slot: WorkerSlot) -> None:
        self.link = link
        self.keys = keys
        self.lease = lease
        self.calls = FencedCalls(link, slot)
        self.fetcher = Fetcher(link, keys, lease)
        self._slot = slot
        self.poll = LongPoll(link, self.fetcher, slot.poll)
        self.session = ""
        self.last_main = b"0-0"
        self.last_retry = b"0-0"

    def watch(self) -> bool:
        """Watch the fence, so that the next read fails if the fence changes before it.

        Return False if the fence already contains another token.
        """
        return self.fetcher.watch()

    def record_last_ids(self, retry: bytes, main: bytes) -> None:
        """Record the last ID that the group has read in each stream. b'' leaves it unchanged."""
        self.last_retry, self.last_main = retry or self.last_retry, main or self.last_main

    def send(self, main_acks: list[bytes], retry_acks: list[bytes], count: int) -> None:
        """Send a read of up to `count` entries per stream, together with acknowledgments.

        Call `receive` next to get the answer.
        """
        self.fetcher.send_round(main_acks, retry_acks, count)
        self._slot.add("round_trips")

    def receive(self) -> FetchResult:
        """Wait for the answer to `send`, and return it.

        Raises RedisUnavailableError if the connection is lost. Pass the answer to `accept`.
        """
        return self.fetcher.receive_round(polled=False)

    def start_poll(self, count: int, seconds: float) -> None:
        """Send a read that waits at the server for new entries, for up to `seconds`."""
        self._slot.add("round_trips")  # counted before another client can see that the poll waits
        self.poll.start(count, self.last_retry, self.last_main, seconds)

    def accept(self, fetched: FetchResult) -> FetchResult | None:
        """Check the answer to a read, and return it.

        Return None if Redis refused the read because its memory is full. Raises Fenced if the fence
        contains another token, and RedisResponseError if Redis refused the read for another reason.
        """
        if not fetched.owned:
            raise Fenced
        if fetched.error == "OOM":
            return None
        if fetched.error:
            message = f"reading {self.lease.assignment} was refused: {fetched.error}"
            raise RedisResponseError(fetched.error, message)
        # Advance past the entries that the poll has reported, so that the next poll does not report
        # them again.
        self.record_last_ids(*fetched.reported)
        return fetched

    def read_by_script(self, count: int) -> FetchResult:
        """Read up to `count` entries per stream with a script.

        Unlike a plain read, most servers run the script even if their memory is full. Raises the
        errors of `FencedCalls.run`.
        """
        call = messages.fetch(self.keys, self.lease, self.session, count)
        retried, main = self.calls.run(call).values
        received = sum(sum(map(len, fields)) for _, fields in retried + main)
        return FetchResult(True, True, 0, retried, main, "", received)
