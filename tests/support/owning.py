"""Assignments that an instance owns, set up without the instance."""

from __future__ import annotations

from collections.abc import Sequence

from streamqd import config
from streamqd.model import Assignment
from streamqd.scoreboard import InstanceFlags, Scoreboard, WorkerState
from streamqd.store import messages, topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.contract.harness import ASSIGNMENT


def create_groups(link: Connection, keys: Keys, count: int) -> list[Assignment]:
    """Register the topic of ASSIGNMENT with `count` partitions, each of which has the group."""
    topics.create(Store(link, keys), ASSIGNMENT.topic, config.Topic(partitions=count))
    assignments = [ASSIGNMENT._replace(partition=number) for number in range(count)]
    link.run_many([messages.ensure_group(keys, assignment, "0") for assignment in assignments])
    return assignments


def make_owned_board(assignments: Sequence[Assignment]) -> Scoreboard:
    """Return a scoreboard on which all assignments are owned, each with a ready worker."""
    board = Scoreboard(len(assignments))
    board.flags = InstanceFlags.MEMBER
    for assignment in assignments:
        slot = board.allot(assignment)
        slot.owned, slot.state = 1, WorkerState.READY
    return board
