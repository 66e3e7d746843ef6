"""The harness of contract tests: it seeds one assignment and compares all keys of its server.

`expect` runs a call and checks its word. After a refusal, it also checks that no byte of any key
has changed. `state` reads the whole keyspace in a form that a test can spell out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from streamqd.errors import RedisResponseError
from streamqd.model import Assignment, Lease
from streamqd.store import leases, messages
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply
from streamqd.store.store import Store

# A script that gives one of these answers has written nothing.
REFUSALS = frozenset(
    (
        *("CHANGED", "DELETING", "MISSING", "OWNED", "UNSETTLED"),
        *(
            "UNCHANGED",
            "DUPLICATE",
            "EXISTS",
            "FENCED",
            "FULL",
            "GONE",
            "HELD",
            "LOST",
            "MISMATCH",
            "MISSING_GROUP",
        ),
        *("MOVED", "MOVING", "NOGROUP", "NO_GROUPS", "OTHER", "SESSION", "DUPLICATE"),
        *("STARTED", "DONE", "PAST"),
        *("AGAIN", "OPERATOR", "SAME", "UNFENCED"),
    )
)
ASSIGNMENT = Assignment("access", 0, "hits")
OWNER = "west-1"
TTL = 15.0


class Stream(NamedTuple):
    """A stream as a test spells it: its entries by ID, and its groups by name."""

    entries: dict[str, dict[str, bytes]]
    groups: dict[str, tuple[str, dict[str, str]]]  # name -> (last delivered, id -> consumer)


class Harness:
    """Drives one assignment on a real server: writes its keys, runs scripts, reads the keys."""

    def __init__(self, link: Connection, keys: Keys, assignment: Assignment = ASSIGNMENT) -> None:
        self.link = link
        self.keys = keys
        self.assignment = assignment
        self.do = link.execute
        topic, partition, group = assignment
        self.stream = keys.stream(topic, partition)
        self.retry = keys.retry_stream(topic, partition, group)
        self.dlq = keys.dlq(topic, partition)
        self.lease = keys.lease(topic, partition, group)
        self.fence = keys.fence(topic, partition, group)
        self.delayed = keys.retry(topic, partition, group)
        self.items = keys.retry_items(topic, partition, group)
        self.attempts = keys.attempts(topic, partition, group)
        self.epochs = keys.epochs(topic, partition, group)
        self.delayed_sends = keys.delayed_sends(topic, partition)
        self.delayed_send_items = keys.delayed_send_items(topic, partition)
        self.trim = keys.trim(topic, partition)
        self._short = {
            getattr(self, name): name
            for name in (
                *("stream", "retry", "dlq", "lease", "fence", "delayed", "items", "attempts"),
                *("delayed_sends", "delayed_send_items", "trim"),
            )
        }

    # --- running ---

    @property
    def store(self) -> Store:
        return Store(self.link, self.keys)

    def expect(self, script: str, word: str, call: Call) -> list[Any]:
        """Run a call of a script that must answer this word. Return the rest of the answer."""
        assert call.script.name == script
        before = self.dump()
        reply = self.link.run(call)
        assert reply.word == word, f"{script} answered {reply}"
        if word in REFUSALS:
            assert self.dump() == before, f"{script} wrote something and answered {word}"
        return reply.values

    def expect_entries(self, script: str, words: list[str], call: Call) -> messages.SettledReply:
        """Run a call that settles entries and must answer these words, one per entry."""
        before = self.dump()
        rest = self.expect(script, "OK", call)
        settled = messages.SettledReply.parse(Reply("OK", rest))
        assert settled.words == words
        if "MOVED" not in words:
            assert self.dump() == before, f"{script} wrote something and moved nothing"
        return settled

    def expect_words(self, script: str, words: list[str], call: Call) -> None:
        """Run a call of a schedule script that must answer these words, one per schedule."""
        [found, *_] = self.expect(script, "OK", call)
        assert [each.decode() for each in found] == words

    def expect_error(self, code: str, call: Call) -> RedisResponseError:
        """Run a call that must fail with this error and write nothing."""
        before = self.dump()
        with pytest.raises(RedisResponseError) as caught:
            self.link.run(call)
        assert caught.value.code == code, str(caught.value)
        assert self.dump() == before, f"{call.script.name} wrote something and failed with {code}"
        return caught.value

    def now_unix_ms(self) -> int:
        seconds, micros = self.do("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    @contextmanager
    def instant(self) -> Iterator[Instant]:
        """Yield an Instant that covers the server's clock for the duration of the block."""
        taken = Instant(self.now_unix_ms(), 0)
        yield taken
        taken.last = self.now_unix_ms()

    @contextmanager
    def full_memory(self) -> Iterator[None]:
        """Make the server refuse every command that may need memory."""
        self.do("CONFIG", "SET", "maxmemory", "1")
        try:
            yield
        finally:
            self.do("CONFIG", "SET", "maxmemory", "0")

    def leased(self, token: str, epoch: int = 0) -> Lease:
        """Return the lease that this token has on the assignment."""
        return Lease(self.assignment, token, epoch)

    # --- seeding ---

    def groups(self) -> None:
        """Create the assignment's group, which starts at the first message."""
        self.link.run(messages.ensure_group(self.keys, self.assignment, "0"))

    def own(self, token: str = "t1", *, seen_epoch: int = 0, owner: str = OWNER) -> int:
        """Make a token the owner of the assignment. Return its epoch."""
        call = leases.acquire(self.keys, self.leased(token, seen_epoch), TTL, owner)
        reply = self.link.run(call)
        assert reply.word == "OK", reply
        return int(reply.values[0])

    def add(self, entry_id: str, *fields: str | bytes, stream: str = "") -> bytes:
        """Write an entry with this ID. Return its place."""
        key = stream or self.stream
        self.do("XADD", key, entry_id, *(fields or ("payload", f"body of {entry_id}")))
        return (b"r:" if key == self.retry else b"m:") + entry_id.encode()

    def fetch(self, count: int = 10, consumer: str = "w", stream: str = "") -> list[bytes]:
        """Read as a consumer of the assignment's group. Return the IDs."""
        key = stream or self.stream
        group = self.assignment.group
        got = self.do("XREADGROUP", "GROUP", group, consumer, "COUNT", count, "STREAMS", key, ">")
        return [entry[0] for entry in got[0][1]] if got else []

    def pending(self, *ids: str) -> list[bytes]:
        """Create the group, write entries 1-0, 2-0 … to the partition, and read them.

        Return their places.
        """
        self.groups()
        places = [self.add(entry_id) for entry_id in ids]
        assert len(self.fetch(len(ids) or 1)) == len(ids)
        return places

    def pending_retry(self, *ids: str) -> list[bytes]:
        """Do the same in the retry stream, whose group must already exist."""
        places = [self.add(entry_id, stream=self.retry) for entry_id in ids]
        assert len(self.fetch(len(ids), stream=self.retry)) == len(ids)
        return places

    # --- reading the keyspace ---

    def dump(self) -> dict[bytes, tuple[object, bool]]:
        """Return the bytes of every key, and whether the key expires."""
        return {
            key: (self._bytes(key), self.do("PTTL", key) >= 0)
            for key in sorted(self.do("KEYS", "*"))
        }

    def _bytes(self, key: bytes) -> object:
        """Return all bytes of a key.

        DUMP would not be stable, because a read may reorder the table of a hash or set.
        """
        kind = self.do("TYPE", key)
        if kind == b"hash":
            found = self.do("HGETALL", key)
            return dict(zip(found[::2], found[1::2], strict=True))
        return {*self.do("SMEMBERS", key)} if kind == b"set" else self.do("DUMP", key)

    def state(self) -> dict[str, Any]:
        """Return every key by its short name, as plain values, but not the changes of owner."""
        found = {}
        for raw in sorted(self.do("KEYS", "*")):
            key = raw.decode()
            if key.startswith(f"{self.keys.control}:epochs:"):
                continue  # see `test_owner_changes.py`
            found[self._short.get(key, key)] = self._value(key)
        return found

    def changes(self, before: dict[str, Any]) -> dict[str, Any]:
        """Return the changes since an earlier state: the new values, or None for a deleted key."""
        after = self.state()
        return {
            name: after.get(name)
            for name in sorted({*before, *after})
            if before.get(name) != after.get(name)
        }

    def unpacked(self, key: str, member: str | bytes) -> dict[str, bytes]:
        """Unpack the list of fields in an item of a hash."""
        script = "return cmsgpack.unpack(redis.call('HGET', KEYS[1], ARGV[1]))"
        return _paired(self.do("EVAL", script, 1, key, member))

    def _value(self, key: str) -> Any:
        kind = self.do("TYPE", key)
        if kind == b"string":
            return self.do("GET", key)
        if kind == b"hash" and key in (self.items, self.delayed_send_items):
            return {member.decode(): self.unpacked(key, member) for member in self.do("HKEYS", key)}
        if kind == b"hash":
            return _paired(self.do("HGETALL", key))
        if kind == b"zset":
            scored = self.do("ZRANGE", key, 0, -1, "WITHSCORES")
            return {
                m.decode(): int(float(s)) for m, s in zip(scored[::2], scored[1::2], strict=True)
            }
        if kind == b"set":
            return set(self.do("SMEMBERS", key))
        assert kind == b"stream", kind
        return self.read_stream(key)

    def read_stream(self, key: str) -> Stream:
        entries = {i.decode(): _paired(fields) for i, fields in self.do("XRANGE", key, "-", "+")}
        groups = {}
        for flat in self.do("XINFO", "GROUPS", key):
            info = _paired(flat)
            name = info["name"].decode()
            rows = self.do("XPENDING", key, name, "-", "+", 100_000)
            waiting = {row[0].decode(): row[1].decode() for row in rows}
            groups[name] = (info["last-delivered-id"].decode(), waiting)
        return Stream(entries, groups)


class Instant:
    """A span of the server's clock (unix ms), which equals any time within it."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def __add__(self, wait_ms: int) -> Instant:
        return Instant(self.first + wait_ms, self.last + wait_ms)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int | bytes) and self.first <= int(other) <= self.last

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self.first} to {self.last}>"


def _paired(flat: list[Any]) -> dict[str, Any]:
    return {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
