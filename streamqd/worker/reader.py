"""Reading: how many entries come into hand next, what rides on the read, and the long poll.

A read is one round trip (`store.fetch`): it acknowledges what has ended, brings entries, and tells
whether the fence is still ours. Where the last read brought nothing, a long poll goes before the
next one: it waits at the server until there is an entry.
"""

from __future__ import annotations

import time

from streamqd.errors import RedisRefused, RedisUnavailable, SilentConnection
from streamqd.long_poll import PollWords
from streamqd.scoreboard import now_ns
from streamqd.store import items, messages
from streamqd.store.client import Connection
from streamqd.store.doubt import Silence
from streamqd.store.fetch import Fetcher, FetchResult
from streamqd.worker.context import WorkerContext
from streamqd.worker.executor import Executor
from streamqd.worker.fenced import Fenced, FencedCalls
from streamqd.worker.prefetch import PrefetchController
from streamqd.worker.settler import DEFER_SECONDS

BLOCK_SECONDS = 15.0  # longest wait of one long poll
REPLY_SECONDS = 10.0  # longest wait for an answer that does not block
RECOVER_PAGE = 64


class LongPoll:
    """A long poll and the read behind it, from its sending to its answer.

    It holds the connection all that time, and what that read brings is ours to handle.
    """

    def __init__(self, link: Connection, fetcher: Fetcher, words: PollWords) -> None:
        self._doubt = link.node.doubt
        self._fetcher = fetcher
        self._words = words
        self._silence: Silence | None = None
        self.count = 0  # how many entries of each stream it may bring

    @property
    def waiting(self) -> bool:
        """True while waiting for the answer."""
        return self._silence is not None

    def start(self, count: int, retry: bytes, main: bytes, seconds: float) -> None:
        """Wait `seconds` at most for entries behind these ids, and read `count` of each stream.

        No acknowledgement rides on it: it may wait.
        """
        poll = self._fetcher.long_poll(retry, main, seconds)
        self._fetcher.send_round([], [], count, poll)
        self.count = count
        self._words.begin(now_ns(), retry, main)
        assert self._doubt is not None
        self._silence = self._doubt.silence(time.monotonic() + seconds, REPLY_SECONDS)

    def fileno(self) -> int:
        """The descriptor that is readable when the answer comes."""
        return self._fetcher.sock.fileno()

    def left(self) -> float:
        """Seconds until `check` has something to do."""
        return 0.0 if self._silence is None else self._silence.left()

    def check(self) -> None:
        """Judge that nothing has come yet.

        Raises RedisUnavailable, and SilentConnection when the housekeeper has seen an entry.
        """
        if self._words.is_missed:
            raise SilentConnection(
                "the connection is silent: a message came, and it was not told", sent=True
            )
        try:
            if self._silence is not None and not self._silence.left():
                self._silence.judge(self._fetcher.sock)
        except TimeoutError as error:
            raise RedisUnavailable(f"no answer from Redis: {error}", sent=True) from error

    def answer(self) -> FetchResult:
        """Return what has come. Raises RedisUnavailable."""
        fetched = self._fetcher.receive_round(polled=True)
        if self._silence is not None:
            self._silence.end()
        self.forget()
        return fetched

    def forget(self) -> None:
        """No answer is waited for."""
        self._silence = None
        self._words.end()


class Reader:
    """Reads for one worker. Knows up to which entries the group has read."""

    def __init__(
        self,
        context: WorkerContext,
        fetcher: Fetcher,
        calls: FencedCalls,
        executor: Executor,
        prefetch: PrefetchController,
    ) -> None:
        self._context = context
        self._settler = context.settler
        self._slot = context.slot
        self._lanes = context.consumer.lanes
        self._fetcher = fetcher
        self._calls = calls
        self._executor = executor
        self._prefetch = prefetch
        self.poll = LongPoll(calls.link, fetcher, context.slot.poll)
        self.session = ""  # of the present connection
        self.last_main = b"0-0"
        self.last_retry = b"0-0"

    def heard(self, retry: bytes, main: bytes) -> None:
        """Note the ids up to which the group has read; b'' leaves one unchanged."""
        self.last_retry, self.last_main = retry or self.last_retry, main or self.last_main

    # --- whether to read ---

    def wants(self, count: int = 0) -> bool:
        """Whether a read may bring entries: fewer than `count` will be ready, and there is room.

        `count` defaults to the number of lanes.
        """
        executor = self._executor
        if self.poll.waiting or executor.alone or executor.is_full():
            return False
        return executor.wants(count or self._lanes)

    def takes_along(self) -> bool:
        """Whether a read may go out for what rides on it, when no lane asks for what it brings."""
        return self.wants(max(self._prefetch.count, self._lanes))

    def wants_ahead(self) -> bool:
        """Whether to read before what can begin does, which then runs while Redis answers."""
        return bool(
            self._executor.about_to_begin and self._settler.only_plain_acks and self.wants()
        )

    # --- how much ---

    def page(self) -> int:
        """How many pending entries may be listed at once. Waits as `_await_room`."""
        return min(RECOVER_PAGE, self._prefetch.count, self._await_room())

    def _await_room(self) -> int:
        """Return how many more entries may come into hand, 1 at least.

        Waits while Redis refuses to take those that are there; acknowledgements go out meanwhile,
        so that memory can be freed.
        """
        settler, consumer = self._settler, self._context.consumer
        while (room := consumer.prefetch_max - len(settler.items)) <= 0:
            settler.flush()
            if settler.items:
                self._context.channel.sleep(0.2)
        return max(1, min(room, self._prefetch.batch_max, self._executor.room))

    # --- reading ---

    def read(self) -> FetchResult:
        """Do one round trip: acknowledge, read, and learn whether the fence is still ours."""
        settler, executor = self._settler, self._executor
        count = min(self._prefetch.count, self._await_room())
        self._fetcher.send_round(settler.main_acks, settler.retry_acks, count)
        self._slot.add("round_trips")
        if executor.about_to_begin:
            executor.start_ready()  # it must not add to what is acknowledged
        fetched = self._fetcher.receive_round(polled=False)
        if fetched.executed and settler.acks_owed:
            settler.acks_confirmed(now_ns())
        return self._accepted(fetched, count)

    @property
    def longest_wait(self) -> float:
        """Longest wait, in seconds, before we must talk to Redis again."""
        return DEFER_SECONDS if self._settler.items else BLOCK_SECONDS

    def start_poll(self) -> None:
        """Send a read that waits for new entries."""
        seconds = self.longest_wait
        if self._executor.inline:  # it needs the connection, too
            seconds = max(0.001, self._executor.patience(seconds))
        count = min(self._prefetch.count, self._await_room())
        self._slot.add("round_trips")  # first: whoever sees the poll finds it counted
        self.poll.start(count, self.last_retry, self.last_main, seconds)

    def answer(self) -> FetchResult:
        """Return what the long poll has brought."""
        return self._accepted(self.poll.answer(), self.poll.count)

    def _accepted(self, fetched: FetchResult, count: int) -> FetchResult:
        """Judge the answer of a read of `count`. Raises Fenced, RedisRefused."""
        if not fetched.mine:
            raise Fenced
        if fetched.error == "OOM":
            fetched = self._read_when_full(count)
        elif fetched.error:
            unit = self._context.unit
            raise RedisRefused(fetched.error, f"reading {unit} was refused: {fetched.error}")
        # Advance past the ids that the poll reported, so that the next one ignores them.
        self.heard(*fetched.reported)
        return fetched

    def _read_when_full(self, count: int) -> FetchResult:
        """Settle and read by scripts: most servers queue nothing while their memory is full."""
        settler = self._settler
        settler.flush()
        share = max(1, count * items.BYTES_MAX // self._context.consumer.prefetch_bytes)
        call = messages.fetch(settler.keys, settler.lease, self.session, min(count, share))
        retried, main = self._calls.run(call).rest
        received = sum(sum(map(len, fields)) for _, fields in retried + main)
        return FetchResult(True, True, 0, retried, main, "", received)
