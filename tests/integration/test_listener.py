"""The housekeeper finds workers whose long poll has missed new entries."""

from __future__ import annotations

import pytest

from streamqd.housekeeper.listener import RECHECK_SECONDS, Listener
from streamqd.long_poll import PollWords
from streamqd.model import Assignment
from streamqd.scoreboard import Scoreboard, WorkerSlot
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store

ASSIGNMENTS = [
    Assignment("access", number, group) for number in range(3) for group in ("hits", "log")
]
NEWEST = (1 << 64) - 1


class Watched:
    """The slots of some assignments, and a listener that checks them."""

    def __init__(self, link: Connection, keys: Keys) -> None:
        self.link, self.keys = link, keys
        board = Scoreboard(len(ASSIGNMENTS))
        self.slots: dict[Assignment, WorkerSlot] = {
            assignment: board.allot(assignment) for assignment in ASSIGNMENTS
        }
        self.wakes = 0
        self.listener = Listener(Store(link, keys), self._wake)

    def _wake(self) -> None:
        self.wakes += 1

    def words(self, assignment: Assignment) -> PollWords:
        return self.slots[assignment].poll

    def wait(
        self, assignment: Assignment, since: int = 1, retry: bytes = b"0-0", main: bytes = b"0-0"
    ) -> None:
        """Mark the worker of an assignment as waiting in its long poll."""
        self.words(assignment).begin(since, retry, main)

    def add(self, key: str, entry_id: str) -> None:
        self.link.execute("XADD", key, entry_id, "payload", "x")

    def look(self) -> float | None:
        return self.listener.run([(slot, assignment) for assignment, slot in self.slots.items()])

    def missed(self) -> set[Assignment]:
        return {assignment for assignment in ASSIGNMENTS if self.words(assignment).is_missed}


@pytest.fixture
def watched(link: Connection, keys: Keys) -> Watched:
    return Watched(link, keys)


def test_listener_wakes_a_worker_that_missed_an_entry(watched: Watched) -> None:
    """The first check finds the worker. The second one confirms that it missed an entry."""
    for assignment in ASSIGNMENTS:
        watched.wait(assignment)
    assert watched.look() is None
    one, keys = ASSIGNMENTS[2], watched.keys
    watched.add(keys.retry_stream(*one), "1-0")
    assert (watched.look(), watched.missed()) == (RECHECK_SECONDS, set())
    assert (watched.look(), watched.missed(), watched.wakes) == (None, {one}, 1)
    assert (watched.look(), watched.wakes) == (None, 1), "once is enough"


def test_listener_does_not_wake_a_worker_that_read_in_time(watched: Watched) -> None:
    one, other = ASSIGNMENTS[:2]
    watched.wait(one)
    watched.wait(other)
    watched.add(watched.keys.source(*one), "1-0")
    assert watched.look() == RECHECK_SECONDS
    watched.words(one).end()
    watched.wait(other, since=2, main=b"1-0")  # the worker was woken and is waiting again
    assert (watched.look(), watched.missed(), watched.wakes) == (None, set(), 0)


def test_listener_tracks_each_group_of_a_partition(watched: Watched) -> None:
    one, other = ASSIGNMENTS[:2]
    watched.wait(one, main=b"5-1")
    watched.wait(other, main=b"5-2")
    for entry_id in ("5-1", "5-2"):
        watched.add(watched.keys.source(*one), entry_id)
    watched.look()
    watched.look()
    assert watched.missed() == {one}


def test_listener_handles_the_greatest_id(watched: Watched) -> None:
    (one, *_), newest = ASSIGNMENTS, b"%d-%d" % (NEWEST, NEWEST)
    watched.wait(one, retry=newest, main=newest)
    poll = watched.words(one).read()
    assert poll is not None
    assert (poll.retry, poll.main) == (newest, newest)
    assert watched.look() is None


def test_listener_skips_a_key_of_a_wrong_type(watched: Watched) -> None:
    bad, good = ASSIGNMENTS[0], ASSIGNMENTS[2]
    watched.link.execute("SET", watched.keys.retry_stream(*bad), "x")
    watched.wait(bad)
    watched.wait(good)
    watched.add(watched.keys.source(*good), "1-0")
    watched.look()
    watched.look()
    assert watched.missed() == {good}
