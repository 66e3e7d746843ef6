"""Measuring in Redis what metrics, status and health show."""

from __future__ import annotations

from collections.abc import Generator, Mapping

from streamqd.housekeeper.batch import Refusals, Steps, read_all
from streamqd.logs import Once
from streamqd.metrics.view import MetricsView
from streamqd.scoreboard import now_ns
from streamqd.store import statistics
from streamqd.store.client import Connection
from streamqd.store.replies import accepted
from streamqd.store.scripts import Reply
from streamqd.store.store import Store


def ask_time(link: Connection, view: MetricsView, key: str) -> None:
    """Note the server's clock: instants of the server are compared with nothing else.

    It reads `key` too: a server that is loading tells the time and refuses everything else.
    """
    time, _ = accepted(link.pipeline((("TIME",), ("EXISTS", key))))
    view.asked_ns = now_ns()
    view.server_unix_ms = int(time[0]) * 1000 + int(time[1]) // 1000


def measure(store: Store, view: MetricsView, bad: Once | None = None) -> Steps:
    """Read the figures of everything that this instance owns into the view, a write at a step.

    What is measured is as old as its beginning.
    """
    began = now_ns()
    units = [unit for _, unit in view.owned()]
    places = sorted({(unit.topic, unit.partition) for unit in units})
    refusals = Refusals()
    calls = [statistics.measure_partition(store.keys, *place) for place in places]
    replies = yield from read_all(store, calls)
    partitions = {
        place: statistics.partition_figures(reply, store.keys.trim(*place))
        for place, reply in zip(places, replies, strict=True)
        if refusals.took(reply) and isinstance(reply, Reply)
    }
    if bad is not None:
        bad.values(each.bad for each in partitions.values() if each.bad is not None)
    calls = [statistics.measure_unit(store.keys, unit) for unit in units]
    replies = yield from read_all(store, calls)
    figures = {
        unit: statistics.unit_figures(reply)
        for unit, reply in zip(units, replies, strict=True)
        if refusals.took(reply) and isinstance(reply, Reply)
    }
    view.letters = yield from _letters(store, view, partitions, refusals)
    view.partitions = partitions
    view.units = {unit: each for unit, each in figures.items() if each is not None}
    view.measured_ns = began
    refusals.raise_first()
    return None


def _letters(
    store: Store,
    view: MetricsView,
    partitions: Mapping[tuple[str, int], statistics.PartitionFigures],
    refusals: Refusals,
) -> Generator[None, None, dict[tuple[str, int], statistics.LetterCount]]:
    """Count dead letters by group, where there are some: a page of each partition at a time.

    What was counted stays counted, so that where nothing has happened, nothing is read again.
    """
    places = [place for place, figures in partitions.items() if figures.dead]
    known = [view.letters.get(place, statistics.LetterCount()) for place in places]
    pairs = zip(places, known, strict=True)
    replies = yield from read_all(
        store, [statistics.count_letters(store.keys, *place, each) for place, each in pairs]
    )
    return {
        place: statistics.letters_counted(each, reply)
        for place, each, reply in zip(places, known, replies, strict=True)
        if refusals.took(reply) and isinstance(reply, Reply)
    }
