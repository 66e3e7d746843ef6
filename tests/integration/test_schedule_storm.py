"""No tick is sent twice while schedules are moved, edited, paused and run by hand."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from streamqd.admin import schedules as admin
from streamqd.config import Schedule, Topic
from streamqd.errors import RequestRefusedError
from streamqd.schedules.firing import Firer
from streamqd.schedules.reconciliation import Reconciler
from streamqd.store import topics
from streamqd.store.client import Connection, connect
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.integration.test_schedules import read_ticks
from tests.support.servers import Server

TOPICS = ("a", "b", "c")
PARTITIONS = 3
NAMES = [f"s{number}" for number in range(12)]


class Deploys:
    """The specifications of the newest deployment. Each deployment moves two schedules."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since = 1
        self._now = dict.fromkeys(NAMES, ("a", "0"))

    def next(self, chance: random.Random) -> tuple[int, list[Schedule]]:
        with self._lock:
            self._since += 1
            for name in chance.sample(NAMES, 2):
                self._now[name] = chance.choice(TOPICS), str(chance.randrange(1000))
            return self._since, [
                Schedule(name, topic, every=1.0, payload=payload, misfire="all")
                for name, (topic, payload) in self._now.items()
            ]


def housekeeper(store: Store, _chance: random.Random, ending: float, _deploys: Deploys) -> None:
    firer = Firer(store, set, lambda _outcome: None)
    while time.monotonic() < ending:
        time.sleep(min(firer.turn(), 0.02))


def deployer(store: Store, chance: random.Random, ending: float, deploys: Deploys) -> None:
    while time.monotonic() < ending:
        since, schedules = deploys.next(chance)
        Reconciler(store, "default", schedules, since, {}).run()
        time.sleep(chance.random() * 0.2)


def operator(store: Store, chance: random.Random, ending: float, _deploys: Deploys) -> None:
    while time.monotonic() < ending:
        name = chance.choice(NAMES)
        act = chance.choice([admin.pause, admin.resume, admin.resume, run])
        with contextlib.suppress(RequestRefusedError):  # a move or other change is in progress
            act(store, [name])
        time.sleep(chance.random() * 0.1)


def run(store: Store, names: Sequence[str]) -> None:
    admin.run(store, names[0])


ROLES = (housekeeper, housekeeper, housekeeper, deployer, deployer, operator)


@pytest.mark.parametrize("seconds", [3.0, pytest.param(15.0, marks=pytest.mark.slow)])
def test_concurrent_changes_send_no_tick_twice(
    server: Server, link: Connection, keys: Keys, seconds: float
) -> None:
    """Three housekeepers, two racing deployers and an operator act, but no tick is sent twice."""
    store = Store(link, keys)
    for topic in TOPICS:
        topics.create(store, topic, Topic(partitions=PARTITIONS))
    deploys, ending = Deploys(), time.monotonic() + seconds
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(ROLES)) as pool:
        working = []
        for seed, role in enumerate(ROLES):
            own = connect(server.settings, timeout=10.0, name=f"test:{seed}")
            stack.callback(own.close)
            own.open()
            chance = random.Random(seed)
            working.append(pool.submit(role, Store(own, keys), chance, ending, deploys))
        for each in working:
            each.result()
    found = Counter(each for topic in TOPICS for each in read_ticks(store, topic, PARTITIONS))
    assert [each for each, times in found.items() if times > 1] == []
    assert len({name for name, _ in found}) > len(NAMES) // 2  # some are always paused
