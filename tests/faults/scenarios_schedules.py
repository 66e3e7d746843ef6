"""A scenario of schedules that are declared twice, moved when the topic grows, and fired."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from unittest import mock

from streamqd.config import Schedule, Topic
from streamqd.errors import RedisUnavailableError
from streamqd.schedules import firing
from streamqd.schedules.firing import Firer
from streamqd.schedules.reconciliation import MoveFinisher, Reconciler
from streamqd.schedules.record import choose_partition
from streamqd.store import topics
from streamqd.store.store import Store
from tests.contract.harness import ASSIGNMENT
from tests.faults.scenario_runner import ScenarioContext

TRIES = 5
ROUNDS = 6  # a move finishes in the third turn at the latest
PARTITIONS = 4
YEARLY = Schedule(name="annual", topic=ASSIGNMENT.topic, cron="0 0 1 1 *")
NEW_YEAR = round(datetime(datetime.now(UTC).year, 1, 1, tzinfo=UTC).timestamp() * 1000)


def schedules_of_an_instance(context: ScenarioContext) -> None:
    """Send a tick exactly once and to the new partition, whichever command is lost."""
    store, keys = context.store, context.keys
    link = context.faulty_link()
    shaky = Store(link, keys)
    topics.create(store, ASSIGNMENT.topic, Topic(partitions=1))
    for since in (1, 2):  # a second release declares the same schedules again
        until_done(Reconciler(shaky, "default", (YEARLY,), since, {}).run)
    number = choose_partition(YEARLY, PARTITIONS)
    assert number, "the growth moves it"
    store.execute("ZADD", keys.schedules_due(ASSIGNMENT.topic, 0), NEW_YEAR, YEARLY.name)
    store.execute("HSET", keys.meta(ASSIGNMENT.topic), "partitionCount", PARTITIONS)

    stream = keys.stream(ASSIGNMENT.topic, number)
    finisher = MoveFinisher(shaky)
    with mock.patch.multiple(firing, PLACES_INTERVAL_SECONDS=0.0, STAGGER_MS=0):
        for _ in range(ROUNDS):
            until_done(finisher.run)
            until_done(Firer(shaky, set, lambda _outcome: None).turn)
    assert store.execute("XLEN", stream) == 1
    assert not store.execute("EXISTS", keys.stream(ASSIGNMENT.topic, 0))
    # Two of the times are not compared, because a move may forget when the release declared it.
    store.execute("HDEL", keys.schedules_last(ASSIGNMENT.topic, number), f"{YEARLY.name}:late")
    store.execute("HDEL", keys.schedules(ASSIGNMENT.topic, number), f"{YEARLY.name}:since")
    link.close()


def until_done(act: Callable[[], object]) -> None:
    """Repeat a call until Redis answers, as the housekeeper does in its next turn."""
    for _ in range(TRIES):
        try:
            act()
            return
        except RedisUnavailableError:
            continue
    raise AssertionError("it does not come to an end")
