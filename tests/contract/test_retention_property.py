"""Retention never removes an entry that a group or an archive needs.

Random histories on a real server: writes, reads, acknowledgements out of order, new and deleted
groups, and an archive, interleaved with every bound, alone and combined.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from streamqd.store import retention
from streamqd.store.retention import Trimmed
from tests.contract.desk import Desk
from tests.contract.scenarios import trim_all

STEPS = 60
GROUPS = ("hits", "audit", "mail")


class History:
    """One partition, the unsettled entries of its groups, and all entries ever written."""

    def __init__(self, desk: Desk, chance: random.Random) -> None:
        self.desk = desk
        self.chance = chance
        self.written: list[str] = []
        self.needed: dict[str, set[str]] = {}
        self.archived = 0  # number of written entries that are archived
        self.gone: set[str] = set()

    def write(self) -> None:
        count = self.chance.randrange(1, 250)
        size = self.chance.choice([1, 50, 3000])
        first = len(self.written) + 1
        ids = [f"{1_000 * number}-{number % 3}" for number in range(first, first + count)]
        self.desk.link.pipeline([("XADD", self.desk.stream, i, "payload", "x" * size) for i in ids])
        self.written += ids
        for needed in self.needed.values():
            needed |= {*ids}

    def join(self) -> None:
        name = self.chance.choice(GROUPS)
        if name in self.needed:
            return
        if name == "hits":
            self.desk.groups()
        else:
            self.desk.do("XGROUP", "CREATE", self.desk.stream, name, "0", "MKSTREAM")
        rows = self.desk.do("XRANGE", self.desk.stream, "-", "+")
        at = self.desk.read_stream(self.desk.stream).groups[name][0]
        mark = self.order(at)
        self.needed[name] = {i.decode() for i, _ in rows if self.order(i.decode()) > mark}

    def leave(self) -> None:
        if len(self.needed) > 1:
            name = self.chance.choice(sorted(self.needed))
            self.desk.do("XGROUP", "DESTROY", self.desk.stream, name)
            del self.needed[name]

    def read(self) -> None:
        for name in self.needed:
            count = self.chance.randrange(1, 200)
            self.desk.do(
                *(
                    "XREADGROUP",
                    "GROUP",
                    name,
                    "w",
                    "COUNT",
                    count,
                    "STREAMS",
                    self.desk.stream,
                    ">",
                )
            )

    def settle(self) -> None:
        """Acknowledge some entries in any order, sometimes nearly all."""
        for name, needed in self.needed.items():
            rows = self.desk.do("XPENDING", self.desk.stream, name, "-", "+", 10_000)
            pending = [row[0].decode() for row in rows]
            share = self.chance.choice([0.1, 0.9, 1.0])
            done = [each for each in pending if self.chance.random() < share]
            if done:
                self.desk.do("XACK", self.desk.stream, name, *done)
                needed -= {*done}

    def archive(self) -> None:
        if self.archived < len(self.written):
            self.archived = self.chance.randrange(self.archived, len(self.written)) + 1
            self.desk.do("HSET", self.desk.trim, "archived", self.written[self.archived - 1])

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
        reply = self.desk.link.run(trim_all(self.desk, **asked))
        kept = {i.decode() for i, _ in self.desk.do("XRANGE", self.desk.stream, "-", "+")}
        for name, needed in self.needed.items():
            assert needed <= kept, f"{name} lost {sorted(needed - kept)[:3]} by {asked}"
        if asked["archive"]:
            unarchived = {*self.written[self.archived :]} - self.gone
            assert unarchived <= kept, asked
        self.gone = {*self.written} - kept
        if reply.word == "OK":
            self.look(Trimmed.parse(reply), kept)

    def look(self, trimmed: Trimmed, kept: set[str]) -> None:
        """Check the answer and the record against the stream."""
        record = self.desk.state()["trim"]
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
def test_retention_never_removes_a_needed_entry(desk: Desk, seed: int) -> None:
    history = History(desk, random.Random(seed))
    history.join()
    acts = [history.write, history.read, history.settle, history.trim]
    rare = [history.join, history.leave, history.archive]
    for _ in range(STEPS):
        history.chance.choice(acts if history.chance.random() < 0.85 else rare)()
    assert len(history.written) > 500
    # When everything is settled, nothing is left.
    desk.do("HSET", desk.trim, "archived", history.written[-1])
    for name in history.needed:
        desk.do("XGROUP", "SETID", desk.stream, name, "$")
        rows = desk.do("XPENDING", desk.stream, name, "-", "+", 10_000)
        if rows:
            desk.do("XACK", desk.stream, name, *(row[0] for row in rows))
    while Trimmed.parse(desk.link.run(trim_all(desk, expected=[], limit=10_000))).removed:
        pass
    assert desk.do("XLEN", desk.stream) == 0


def test_drop_settles_only_its_dropped_entries(desk: Desk) -> None:
    """Entries that are still in the partition stay pending."""
    chance = random.Random(7)
    history = History(desk, chance)
    history.join()
    while "hits" not in history.needed:
        history.join()
    for _ in range(5):
        history.write()
        history.read()
        history.settle()
    kept_from = chance.randrange(1, len(history.written))
    desk.do("XTRIM", desk.stream, "MINID", "=", history.written[kept_from])
    before = {row[0] for row in desk.do("XPENDING", desk.stream, "hits", "-", "+", 10_000)}
    desk.link.run(retention.settle_missing(desk.keys, desk.unit, 5_000))
    after = {row[0] for row in desk.do("XPENDING", desk.stream, "hits", "-", "+", 10_000)}
    there = {each.encode() for each in history.written[kept_from:]}
    assert after == before & there
