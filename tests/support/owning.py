"""Units that an instance owns, without the instance."""

from __future__ import annotations

from collections.abc import Sequence

from streamqd import config
from streamqd.model import Unit
from streamqd.scoreboard import InstanceFlags, Scoreboard, WorkerState
from streamqd.store import messages, topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.contract.harness import UNIT


def with_groups(link: Connection, keys: Keys, count: int) -> list[Unit]:
    """Register the topic of UNIT with `count` partitions, each with the group."""
    topics.create(Store(link, keys), UNIT.topic, config.Topic(partitions=count))
    units = [UNIT._replace(partition=number) for number in range(count)]
    link.run_many([messages.ensure_group(keys, unit, "0") for unit in units])
    return units


def board_of(units: Sequence[Unit]) -> Scoreboard:
    """Return a scoreboard on which all units are owned, each with a ready worker."""
    board = Scoreboard(len(units))
    board.flags = InstanceFlags.MEMBER
    for unit in units:
        slot = board.allot(unit)
        slot.owned, slot.state = 1, WorkerState.READY
    return board
