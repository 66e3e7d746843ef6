"""The housekeeper deletes dead letters that exceed the retention of their topic."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamqd import config
from streamqd.config import Settings, Topic
from streamqd.errors import RedisResponseError
from streamqd.housekeeper import dead_letter_expirer
from streamqd.housekeeper.dead_letter_expirer import DeadLetterExpirer
from streamqd.housekeeper.figures import ask_time
from streamqd.metrics.view import MetricsView
from streamqd.model import Assignment
from streamqd.scoreboard import Scoreboard
from streamqd.store import archives, topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.contract.harness import ASSIGNMENT, Harness

pytestmark = pytest.mark.usefixtures("unlimited_turns")


@pytest.fixture
def harness(link: Connection, store: Store, keys: Keys) -> Harness:
    topics.create(store, "access", Topic(partitions=2))
    return Harness(link, keys)


@pytest.fixture
def view(link: Connection) -> MetricsView:
    board = Scoreboard(8)
    board.allot(ASSIGNMENT).owned = 1
    view = MetricsView("web-1", board)
    ask_time(link, view, "any")
    return view


def expire_dead_letters(harness: Harness, view: MetricsView, kept: float | None) -> float | None:
    settings = Settings(topics={"access": Topic(partitions=2, dlq_retention=kept)})
    return DeadLetterExpirer(harness.store, view, settings).run()


def write(harness: Harness, *ages_ms: int) -> None:
    now = harness.now_unix_ms()
    for age in sorted(ages_ms, reverse=True):
        harness.add(f"{now - age}-0", stream=harness.dlq)


def test_dead_letters_are_kept_for_dlq_retention(harness: Harness, view: MetricsView) -> None:
    write(harness, 90_000, 80_000, 1_000)
    harness.do(
        "HSET",
        harness.keys.moving("access", 0),
        harness.do("XRANGE", harness.dlq, "-", "+")[0][0],
        "x",
    )

    assert expire_dead_letters(harness, view, None) is None
    assert harness.do("XLEN", harness.dlq) == 3, "without a setting they stay"
    assert expire_dead_letters(harness, view, 60.0) is None

    assert harness.do("XLEN", harness.dlq) == 1
    assert harness.do("EXISTS", harness.keys.moving("access", 0)) == 0
    assert view.tally("expired") == {("access", "0"): 2}


def test_unarchived_dead_letters_stay_if_an_archive_is_required(
    harness: Harness, view: MetricsView
) -> None:
    write(harness, 90_000, 80_000, 1_000)
    ids = [entry for entry, _ in harness.do("XRANGE", harness.dlq, "-", "+")]
    kept = Topic(partitions=2, dlq_retention=60.0, archive="required")
    expirer = DeadLetterExpirer(harness.store, view, Settings(topics={"access": kept}))

    expirer.run()
    assert harness.do("XLEN", harness.dlq) == 3
    for mark, left in ((ids[0], 2), (ids[2], 1)):
        harness.link.run(archives.advance(harness.keys, "access", 0, mark.decode(), dead=True))
        expirer.run()
        assert harness.do("XLEN", harness.dlq) == left


def test_registered_dlq_retention_is_the_default(harness: Harness, view: MetricsView) -> None:
    topics.create(harness.store, "kept", Topic(partitions=1, dlq_retention=60.0))
    other = Harness(harness.link, harness.keys, Assignment("kept", 0, "hits"))
    view.board.allot(other.assignment).owned = 1
    for each in (harness, other):
        write(each, 90_000)
    meta = topics.meta(harness.store, "access")
    assert meta is not None
    assert "dlq_retention" not in meta.settings

    DeadLetterExpirer(harness.store, view, Settings()).run()

    assert [each.do("XLEN", each.dlq) for each in (harness, other)] == [1, 0]


def test_dead_letters_expire_in_bounded_steps(
    harness: Harness, view: MetricsView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letter_expirer, "ROUNDS_MAX", 2)
    start = harness.now_unix_ms() - 90_000
    harness.link.pipeline(
        [("XADD", harness.dlq, f"{start + number}-0", "payload", "x") for number in range(600)]
    )

    assert expire_dead_letters(harness, view, 60.0) == 0.0
    assert harness.do("XLEN", harness.dlq) == 600 - 2 * dead_letter_expirer.PAGE
    monkeypatch.setattr(dead_letter_expirer, "ROUNDS_MAX", 80)
    assert expire_dead_letters(harness, view, 60.0) is None
    assert harness.do("XLEN", harness.dlq) == 0


def test_dead_letter_expiry_continues_after_a_bad_key(harness: Harness, view: MetricsView) -> None:
    second = Harness(harness.link, harness.keys, Assignment("access", 1, "hits"))
    view.board.allot(second.assignment).owned = 1
    write(second, 90_000)
    harness.do("SET", harness.dlq, "x")

    with pytest.raises(RedisResponseError):
        expire_dead_letters(harness, view, 60.0)
    assert second.do("XLEN", second.dlq) == 0


def test_dead_letters_of_an_unowned_partition_are_kept(harness: Harness, view: MetricsView) -> None:
    second = Harness(harness.link, harness.keys, Assignment("access", 1, "hits"))
    write(second, 90_000)
    expire_dead_letters(harness, view, 60.0)
    assert second.do("XLEN", second.dlq) == 1


def test_dlq_retention_is_a_duration(tmp_path: Path) -> None:
    file = tmp_path / "streamq.toml"
    file.write_text('[topics.access]\ndlq_retention = "30d"\n')
    assert config.load(file, {}).topics["access"].dlq_retention == 30 * 86_400
