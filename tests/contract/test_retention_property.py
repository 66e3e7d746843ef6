"""Retention never removes an entry that a group or an archive needs.

The tests run random histories on a real server: writes, reads, acknowledgments out of order, new
and deleted groups, and an archive. They are interleaved with every retention bound, alone and
combined.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from streamqd.store import retention
from streamqd.store.retention import Trimmed
from tests.contract.harness import Harness
from tests.contract.scenarios import trim_all

STEPS = 60
GROUPS = ("hits", "audit", "mail")


class History:
    """One partition, the unsettled entries of its groups, and all entries ever written to it."""

    def __init__(self, harness: Harness, chance: random.Random) -> None:
        self.harness = harness
        self.chance = chance
        self.written: list[str] = []
        self.needed: dict[str, set[str]] = {}
        self.archived = 0  # number of entries that have been written and archived
        self.gone: set[str] = set()

    def write(self) -> None:
        count = self.chance.randrange(1, 250)
        size = self.chance.choice([1, 50, 3000])
        first = len(self.written) + 1
        ids = [f"{1_000 * number}-{number % 3}" for number in range(first, first + count)]
        self.harness.link.pipeline(
            [("XADD", self.harness.stream, i, "payload", "x" * size) for i in ids]
        )
        self.written += ids
        for needed in self.needed.values():
            needed |= {*ids}

    def join(self) -> None:
        name = self.chance.choice(GROUPS)
        if name in self.needed:
            return
        if name == "hits":
            self.harness.groups()
        else:
            self.harness.do("XGROUP", "CREATE", self.harness.stream, name, "0", "MKSTREAM")
        rows = self.harness.do("XRANGE", self.harness.stream, "-", "+")
        at = self.harness.read_stream(self.harness.stream).groups[name][0]
        mark = self.order(at)
        self.needed[name] = {i.decode() for i, _ in rows if self.order(i.decode()) > mark}

    def leave(self) -> None:
        if len(self.needed) > 1:
            name = self.chance.choice(sorted(self.needed))
            self.harness.do("XGROUP", "DESTROY", self.harness.stream, name)
            del self.needed[name]

    def read(self) -> None:
        for name in self.needed:
            count = self.chance.randrange(1, 200)
            self.harness.do(
                *(
                    "XREADGROUP",
                    "GROUP",
                    name,
                    "w",
                    "COUNT",
                    count,
                    "STREAMS",
                    self.harness.stream,
                    ">",
                )
            )

    def settle(self) -> None:
        """Acknowledge some entries in any order, and sometimes nearly all of them."""
        for name, needed in self.needed.items():
            rows = self.harness.do("XPENDING", self.harness.stream, name, "-", "+", 10_000)
            pending = [row[0].decode() for row in rows]
            share = self.chance.choice([0.1, 0.9, 1.0])
            done = [each for each in pending if self.chance.random() < share]
            if done:
                self.harness.do("XACK", self.harness.stream, name, *done)
                needed -= {*done}

    def archive(self) -> None:
        if self.archived < len(self.written):
            self.archived = self.chance.randrange(self.archived, len(self.written)) + 1
            self.harness.do("HSET", self.harness.trim, "archived", self.written[self.archived - 1])

    def trim(self) -> None:
        chance, total = self.chance, len(self.written)
        asked: dict[str, Any] = {
            "keep_from": chance.choice(["", "0-0", f"{1_000 * chance.randrange(total + 1)}-0"]),
            "max_length": chance.choice([None, 0, chance.randrange(total + 1)]),
            "max_bytes": chance.choice([None, 1, 100_000]),
            "shrink_every": chance.choice([None, 0.0]),
            "archive": chance.random() < 0.3,
            "without_groups": chance.random() < 0.3,
            "limit": chance.choice([1, 100, 1_000, 10_000]),
            "expected": [],
        }
        reply = self.harness.link.run(trim_all(self.harness, **asked))
        kept = {i.decode() for i, _ in self.harness.do("XRANGE", self.harness.stream, "-", "+")}
        for name, needed in self.needed.items():
            assert needed <= kept, f"{name} lost {sorted(needed - kept)[:3]} by {asked}"
        if asked["archive"]:
            unarchived = {*self.written[self.archived :]} - self.gone
            assert unarchived <= kept, asked
        self.gone = {*self.written} - kept
        if reply.word == "OK":
            self.look(Trimmed.parse(reply), kept)

    def look(self, trimmed: Trimmed, kept: set[str]) -> None:
        """Compare the answer and the record with the stream."""
        record = self.harness.state()["trim"]
        ordered = sorted(kept, key=self.order)
        assert int(record["size"]) == len(kept)
        if ordered:
            assert record["first"].decode() == ordered[0]
        assert int(record.get("removed", 0)) == len(self.written) - len(kept)
        for needed in self.needed.values():
            for each in needed:
                assert self.order(each) >= self.order(trimmed.floor)

    @staticmethod
    def order(entry_id: str) -> tuple[int, ...]:
        return tuple(map(int, entry_id.split("-")))


@pytest.mark.parametrize("seed", range(10))
def test_retention_never_removes_a_needed_entry(harness: Harness, seed: int) -> None:
    history = History(harness, random.Random(seed))
    history.join()
    acts = [history.write, history.read, history.settle, history.trim]
    rare = [history.join, history.leave, history.archive]
    for _ in range(STEPS):
        history.chance.choice(acts if history.chance.random() < 0.85 else rare)()
    assert len(history.written) > 500
    # Once everything is settled, nothing is left.
    harness.do("HSET", harness.trim, "archived", history.written[-1])
    for name in history.needed:
        harness.do("XGROUP", "SETID", harness.stream, name, "$")
        rows = harness.do("XPENDING", harness.stream, name, "-", "+", 10_000)
        if rows:
            harness.do("XACK", harness.stream, name, *(row[0] for row in rows))
    while Trimmed.parse(harness.link.run(trim_all(harness, expected=[], limit=10_000))).removed:
        pass
    assert harness.do("XLEN", harness.stream) == 0


def test_stream_drop_settles_only_its_dropped_entries(harness: Harness) -> None:
    """Only dropped entries are settled. Those that are still in the partition stay pending."""
    chance = random.Random(7)
    history = History(harness, chance)
    history.join()
    while "hits" not in history.needed:
        history.join()
    for _ in range(5):
        history.write()
        history.read()
        history.settle()
    kept_from = chance.randrange(1, len(history.written))
    harness.do("XTRIM", harness.stream, "MINID", "=", history.written[kept_from])
    before = {row[0] for row in harness.do("XPENDING", harness.stream, "hits", "-", "+", 10_000)}
    harness.link.run(retention.settle_missing(harness.keys, harness.assignment, 5_000))
    after = {row[0] for row in harness.do("XPENDING", harness.stream, "hits", "-", "+", 10_000)}
    there = {each.encode() for each in history.written[kept_from:]}
    assert after == before & there
