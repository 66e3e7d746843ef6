"""The tasks and the driver of the Spark sink on a real server, without Spark."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from streamqd import config
from streamqd.admin import topics_deletion
from streamqd.errors import (
    InvalidValueError,
    MessageTooLargeError,
    RedisResponseError,
    RequestRefusedError,
    TopicNotFoundError,
)
from streamqd.policy.partitioning import crc32_partition
from streamqd.spark import outgoing, streams
from streamqd.spark.options import WriteOptions, write_options
from streamqd.store import spark as store
from streamqd.store import topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.spark import ROWS_MAX
from streamqd.store.store import Store
from tests.support.servers import Server

pa = pytest.importorskip("pyarrow")
sink = pytest.importorskip("streamqd.spark.sink")
staging = pytest.importorskip("streamqd.spark.staging")
QUERY = "query"


class Shop:
    """A topic of two partitions, and tasks that write to it."""

    def __init__(self, server: Server, link: Connection, keys: Keys) -> None:
        self.server, self.link, self.keys = server, link, keys
        topics.create(Store(link, keys), "out", config.Topic(partitions=2))

    def options(self, **given: object) -> WriteOptions:
        every = {"url": self.server.url, "topic": "out", "retryIntervalMs": 1} | given
        return write_options({name.lower(): str(value) for name, value in every.items()}, {})

    def stage(self, rows: Any, *, batch: int = 3, task: int = 0, **given: object) -> Any:
        """Stage rows in the same way as a task. Return the task's message."""
        options = self.options(batchRows=4, **given)
        stage = staging.Stage(options, QUERY, batch)
        return stage.message(sink.deliver(rows, options, task, stage.send))

    def publish(self, parts: list[Any], *, batch: int = 3, **given: object) -> None:
        """Publish a batch in the same way as the driver."""
        staging.Publisher(self.options(**given), QUERY).commit(batch, parts)

    def batch(self, tasks: list[Any], *, batch: int = 3) -> None:
        parts = [self.stage(rows, batch=batch, task=task) for task, rows in enumerate(tasks)]
        self.publish(parts, batch=batch)

    def staged_keys(self) -> list[bytes]:
        """Return the keys of all staged streams, even of the empty ones."""
        return sorted(self.link.execute("KEYS", f"{self.keys.control}:sink:{{out:*"))

    def non_empty_keys(self) -> list[bytes]:
        """Return the keys of the streams that contain staged rows."""
        return [key for key in self.staged_keys() if self.link.execute("XLEN", key)]

    def forget(self, *, written: bool = True) -> None:
        streams = [self.keys.stream("out", number) for number in range(2)]
        self.link.execute("DEL", self.keys.sink(QUERY), *(streams if written else ()))

    def read_written(self, partitions: int = 2) -> list[list[bytes]]:
        keys = [self.keys.stream("out", number) for number in range(partitions)]
        pages = self.link.pipeline([("XRANGE", key, "-", "+") for key in keys])
        return [[fields[1] for _, fields in page] for page in pages]

    def read_all_written(self) -> list[bytes]:
        return sorted(value for page in self.read_written() for value in page)

    def grow(self, partitions: int) -> None:
        self.link.execute("HSET", self.keys.meta("out"), "partitionCount", partitions)


@pytest.fixture
def shop(server: Server, link: Connection, keys: Keys) -> Shop:
    return Shop(server, link, keys)


def rows(*values: str, key: bool = True) -> list[Any]:
    """Return rows whose key is the same as their value, or rows without a key."""
    made = []
    for value in values:
        raw = value.encode()
        made.append(outgoing.Row("out", None, raw if key else None, "", [b"payload", raw]))
    return made


LETTERS = [chr(ord("a") + number) for number in range(26)]
BODIES = [letter.encode() for letter in LETTERS]


def split_into_tasks(made: list[Any], count: int) -> list[list[Any]]:
    return [made[number::count] for number in range(count)]


@pytest.mark.parametrize("key", [True, False])
def test_sink_writes_a_batch_with_another_layout_once(shop: Shop, key: bool) -> None:
    """The driver died before it published a batch that four tasks had staged.

    Then one task stages the batch again.
    """
    made = rows(*LETTERS, key=key)
    for task, part in enumerate(split_into_tasks(made, 4)):
        shop.stage(part, task=task)
    assert shop.read_all_written() == []
    for count in (1, 3, 4):
        shop.batch(split_into_tasks(made[::-1], count))
    assert shop.read_all_written() == BODIES
    if key:
        first, _ = shop.read_written()
        assert {crc32_partition(each, 2) for each in first} == {0}
    shop.batch(split_into_tasks(made, 2), batch=4)
    assert sum(map(len, shop.read_written())) == 52


def test_sink_keeps_the_order_of_the_rows_of_a_task(shop: Shop) -> None:
    names = [f"{number:04}" for number in range(4 * ROWS_MAX + 50)]
    shop.batch([rows(*names[:600], key=False), rows(*names[600:], key=False)])
    assert shop.read_all_written() == [name.encode() for name in names]
    for page in shop.read_written():
        assert page == sorted(page)


def test_sink_survives_a_driver_kill_anywhere_in_a_commit(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver can be killed after any exchange with Redis.

    Then the batch is repeated with other tasks and rows.

    The rows that were decided are published. Once the first of them is out, no row of the second
    try follows.
    """
    first, second = rows(*LETTERS, key=False), rows(*LETTERS[::-1], "other", key=False)
    monkeypatch.setattr(staging, "CALLS", 1)
    monkeypatch.setattr(store, "ROWS_MAX", 3)
    outcomes = []
    for number in range(100):
        shop.forget()
        parts = [shop.stage(part) for part in split_into_tasks(first, 3)]
        monkeypatch.setattr(staging, "persist", fail_after(number))
        try:
            shop.publish(parts)
        except DeadError:
            monkeypatch.undo()
            monkeypatch.setattr(staging, "CALLS", 1)
            monkeypatch.setattr(store, "ROWS_MAX", 3)
            partly = shop.read_all_written()
            shop.batch(split_into_tasks(second, 5))
            whole = shop.read_all_written()
            decided = whole == BODIES
            assert decided or (whole == sorted([*BODIES, b"other"]) and not partly), number
            outcomes.append((len(partly), decided))
            shop.batch(split_into_tasks(second, 2), batch=4)
            assert len(shop.read_all_written()) == len(whole) + 27
            assert shop.non_empty_keys() == []
            continue
        break
    else:
        raise AssertionError("the commit does not end")
    assert outcomes[0] == (0, False)
    assert outcomes[-1] == (26, True)
    assert len({published for published, _ in outcomes}) > 5


class DeadError(Exception):
    """Stands in for the death of the driver."""


def fail_after(exchanges: int) -> Callable[..., Any]:
    """Return a replacement for `persist` that fails after this number of exchanges.

    The last one is executed.
    """
    left = [exchanges]

    def persist(connection: Any, work: Callable[[Connection], Any], **given: Any) -> Any:
        result = streams.persist(connection, work, **given)
        left[0] -= 1
        if left[0] < 0:
            raise DeadError
        return result

    return persist


def test_sink_publishes_a_batch_of_two_drivers_once(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row is published once, although the second driver starts while the first is active."""
    monkeypatch.setattr(staging, "CALLS", 1)
    monkeypatch.setattr(store, "ROWS_MAX", 3)
    mine = [shop.stage(part) for part in split_into_tasks(rows(*LETTERS), 2)]
    meanwhile: list[bool] = []
    real = staging.Publisher._run_many

    def overtaken(publisher: Any, calls: Any) -> Any:
        if not meanwhile:
            meanwhile.append(True)
            shop.batch(split_into_tasks(rows(*LETTERS), 3))
            shop.batch([rows("next")], batch=4)
        return real(publisher, calls)

    monkeypatch.setattr(staging.Publisher, "_run_many", overtaken)
    with pytest.raises(staging.NotPublishedError, match="already published batch 4"):
        shop.publish(mine)
    assert shop.read_all_written() == sorted([*BODIES, b"next"])


def test_sink_ignores_speculative_and_repeated_tasks(shop: Shop) -> None:
    """Only the attempts that Spark names count. The rows of all others are removed."""
    made = rows(*LETTERS)
    shop.stage(made[:13], task=0)  # the executor of this task was lost
    shop.stage(made[13:20], task=1)  # this second copy of a task was too slow
    counts = [shop.stage(made[:13], task=0), shop.stage(made[13:], task=1)]
    shop.publish(counts)
    assert shop.read_all_written() == BODIES
    assert shop.non_empty_keys() == []


def test_sink_removes_rows_staged_after_the_batch(shop: Shop) -> None:
    """Rows that are staged after their batch are removed with the next batch. They also expire."""
    late = staging.Stage(shop.options(), QUERY, 3)
    sink.deliver(rows("x"), shop.options(), 0, late.send)
    shop.batch([rows("a")])
    sink.deliver(rows("y"), shop.options(), 0, late.send)
    (key,) = shop.non_empty_keys()
    assert 0 < shop.link.execute("PTTL", key) <= 7 * 86_400_000
    shop.batch([rows("b")], batch=4)
    assert shop.non_empty_keys() == []
    assert shop.read_all_written() == [b"a", b"b"]


def test_sink_records_and_staged_rows_expire(shop: Shop) -> None:
    parts = [shop.stage(rows("a"), commitRetention="1h")]
    for key in (*shop.non_empty_keys(), shop.keys.sink(QUERY)):
        assert 0 < shop.link.execute("PTTL", key) <= 3_600_000
    shop.publish(parts, commitRetention="2h")
    assert 3_600_000 < shop.link.execute("PTTL", shop.keys.sink(QUERY)) <= 7_200_000


def test_sink_accepts_batches_without_rows(shop: Shop) -> None:
    for _ in range(2):
        shop.batch([[], []])
        shop.batch([[]], batch=4)
        shop.batch([rows("a"), []], batch=5)
        shop.forget(written=False)
    shop.batch([[], rows("b")], batch=6)
    assert shop.read_all_written() == [b"a", b"a", b"b"]


def test_sink_keeps_partitions_of_rows_despite_a_growth(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decided rows keep the partition for which they were staged, and each of them is there once.

    Otherwise, rows of a key could go to its old partition after other rows have gone to its new
    one.
    """
    made = rows(*LETTERS)
    parts = [shop.stage(made)]
    shop.grow(4)
    with pytest.raises(
        staging.NotPublishedError, match="now has 4 partitions, but had 2 partitions when"
    ):
        shop.publish(parts)
    assert shop.read_all_written() == []
    sink.TopicStreamWriter(shop.options()).abort(parts, 3)
    shop.batch([made])
    assert [crc32_partition(page[0], 4) for page in shop.read_written(4)] == [0, 1, 2, 3]
    die_half_published(shop, monkeypatch, made, batch=4)
    shop.grow(8)
    shop.batch([made[::-1]], batch=4)
    assert [len(page) for page in shop.read_written(8)][4:] == [0] * 4
    assert sum(map(len, shop.read_written(8))) == 52


def die_after_decision(shop: Shop, monkeypatch: pytest.MonkeyPatch, parts: list[Any]) -> None:
    """Make the driver die before it has moved a row."""

    def dying(*_: object) -> None:
        raise DeadError

    with monkeypatch.context() as patch:
        patch.setattr(staging.Publisher, "_publish", dying)
        with pytest.raises(DeadError):
            shop.publish(parts)


def die_half_published(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, made: list[Any], *, batch: int = 3
) -> None:
    """Make the driver die when it has decided a batch and moved three rows of each partition."""
    parts = [shop.stage(made, batch=batch)]
    with monkeypatch.context() as patch:
        patch.setattr(staging, "CALLS", 1)
        patch.setattr(store, "ROWS_MAX", 3)

        def dying(publisher: Any, calls: Any) -> Any:
            real(publisher, calls)
            raise DeadError

        real = staging.Publisher._run_many
        patch.setattr(staging.Publisher, "_run_many", dying)
        with pytest.raises(DeadError):
            shop.publish(parts, batch=batch)


def test_sink_refuses_an_old_checkpoint(shop: Shop) -> None:
    shop.batch([rows("a")], batch=9)
    with pytest.raises(staging.NotPublishedError, match="this query already published batch 9"):
        shop.batch([rows("a")], batch=8)
    assert shop.read_all_written() == [b"a"]


def test_sink_reports_different_rows_of_a_finished_batch(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """Different rows of a finished batch are reported.

    They appear if a checkpoint was copied or set back by one batch.
    """
    shop.batch([rows("a", "b")], batch=0)
    shop.batch([rows("b", "a")], batch=0)
    assert caplog.text == ""
    shop.batch([rows("a", "b", "c")], batch=0)
    assert "already published with 2 rows, so the 3 rows that it has now are dropped" in caplog.text
    topics.create(Store(shop.link, shop.keys), "other", config.Topic(partitions=1))
    parts = [shop.stage([rows("a")[0]._replace(topic="other")], batch=0, topic="other")]
    with pytest.raises(staging.NotPublishedError, match="two queries share this checkpoint"):
        shop.publish(parts, batch=0)
    assert shop.read_all_written() == [b"a", b"b"]


class Task:
    """Stands in for the context of a Spark task."""

    run = "5b0c9a3e-run"

    def partitionId(self) -> int:  # noqa: N802
        return 0

    def getLocalProperty(self, name: str) -> str:  # noqa: N802
        known = {"streaming.sql.batchId": "3", "sql.streaming.queryId": QUERY}
        return (known | {"spark.jobGroup.id": self.run})[name]


def test_sink_removes_the_rows_of_a_failed_task(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed task removes its rows.

    Otherwise, full memory would stay full, because each attempt would add more.
    """
    monkeypatch.setattr(sink, "_task", Task)
    writer = sink.TopicStreamWriter(shop.options(batchRows=4, maxStagedBytes=1000))
    staged: list[int] = []
    real = staging.Stage.drop

    def drop(stage: Any) -> None:
        staged.append(len(shop.non_empty_keys()))
        real(stage)

    monkeypatch.setattr(staging.Stage, "drop", drop)
    with pytest.raises(staging.NotPublishedError, match="maxStagedBytes"):
        writer.write(iter([batch(value=["x" * 100] * 20)]))
    assert staged == [2]
    assert shop.non_empty_keys() == []
    assert shop.link.execute("HGETALL", shop.keys.sink(QUERY)) == []


def test_sink_removes_the_rows_of_an_aborted_batch(shop: Shop) -> None:
    """An aborted batch removes its rows, even those of tasks that had finished."""
    parts = [shop.stage(part) for part in split_into_tasks(rows(*LETTERS), 2)]
    sink.TopicStreamWriter(shop.options()).abort([*parts, None], 3)
    assert shop.non_empty_keys() == []
    assert shop.link.execute("HGETALL", shop.keys.sink(QUERY)) == []


def test_sink_keeps_a_decision_after_a_failed_commit(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sink keeps its decision, although Spark also calls abort after a failed commit."""
    parts = [shop.stage(rows(*LETTERS))]
    die_after_decision(shop, monkeypatch, parts)
    sink.TopicStreamWriter(shop.options()).abort([*parts, shop.stage(rows("x"))], 3)
    shop.batch([rows(*LETTERS)])
    assert shop.read_all_written() == BODIES
    assert shop.non_empty_keys() == []


def test_sink_staged_rows_expire_from_the_first_row(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staged rows expire even if their task dies in the middle of a chunk."""
    real = Connection.pipeline

    def cut_off(link: Connection, commands: Any) -> Any:
        at = [number for number, each in enumerate(commands) if each[0] == "XADD"]
        if not at:
            return real(link, commands)
        real(link, commands[: at[-1]])
        raise DeadError

    monkeypatch.setattr(Connection, "pipeline", cut_off)
    with pytest.raises(DeadError):
        shop.stage([row._replace(partition=0) for row in rows("a", "b", "c")])
    (key,) = shop.non_empty_keys()
    assert shop.link.execute("XLEN", key) == 2
    assert shop.link.execute("PTTL", key) > 0


def test_sink_reports_no_loss_to_the_slower_driver(shop: Shop) -> None:
    """The slower driver sees no loss, although the faster one has removed the unpublished rows."""
    mine, theirs = shop.stage(rows(*LETTERS)), shop.stage(rows(*LETTERS))
    shop.publish([theirs])
    shop.link.execute("DEL", *(shop.non_empty_keys() or ["none"]))
    shop.publish([mine])
    assert shop.read_all_written() == BODIES


def test_sink_refuses_to_publish_after_losing_staged_rows(shop: Shop) -> None:
    parts = [shop.stage(part) for part in split_into_tasks(rows(*LETTERS), 2)]
    shop.link.execute("DEL", shop.non_empty_keys()[0])
    with pytest.raises(staging.NotPublishedError, match="of the staged rows, so nothing"):
        shop.publish(parts)
    assert shop.read_all_written() == []
    shop.batch([rows(*LETTERS)])
    assert shop.read_all_written() == BODIES


def test_sink_reports_lost_staged_rows(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-published batch is always reported, with a message that contains the remedy."""
    parts = [shop.stage(rows(*LETTERS))]
    die_after_decision(shop, monkeypatch, parts)
    shop.link.execute("DEL", *shop.non_empty_keys())
    with pytest.raises(
        staging.NotPublishedError, match="were lost before they were published"
    ) as caught:
        shop.batch([rows(*LETTERS)])
    advice = str(caught.value).split("`")[1].split()
    shop.link.execute(*advice)
    shop.batch([rows(*LETTERS)])
    assert shop.read_all_written() == BODIES


def test_sink_reports_a_batch_without_a_record(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """If the record of a batch has expired, the error reports that its completion is unknown."""
    shop.batch([rows("a")], batch=0)
    shop.batch([rows("b")], batch=1)
    assert caplog.text == ""
    shop.link.execute("DEL", shop.keys.sink(QUERY))
    shop.batch([rows("c")], batch=2)
    assert "the batches of query query before batch 2 are unknown" in caplog.text


def test_sink_bounds_the_staged_bytes(shop: Shop) -> None:
    with pytest.raises(staging.NotPublishedError, match="maxStagedBytes"):
        shop.stage(rows(*("x" * 100 for _ in range(20))), maxStagedBytes=1000)
    assert shop.read_all_written() == []


def test_sink_refuses_an_oversized_plan(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PLAN_BYTES_MAX", 10)
    with pytest.raises(staging.NotPublishedError, match="use fewer tasks"):
        shop.batch([rows("a")])


def test_sink_names_an_invalid_record(shop: Shop) -> None:
    """The error names the key and the field."""
    parts = [shop.stage(rows("a"))]
    shop.link.execute("HSET", shop.keys.sink(QUERY), "batch", "3", "plan", "[]", "attempt:x", "y")
    with pytest.raises(InvalidValueError, match="plan of"):
        shop.publish(parts)


@pytest.mark.parametrize("junk", ["9" * 5000, "-1", "x"])
def test_sink_skips_an_invalid_number_of_an_attempt(shop: Shop, junk: str) -> None:
    shop.link.execute("HSET", shop.keys.sink(QUERY), "attempt:x:out", junk)
    shop.batch([rows(*LETTERS)])
    assert shop.read_all_written() == BODIES


def test_sink_writes_once_after_a_lost_reply(shop: Shop) -> None:
    made = rows(*LETTERS)

    def cut_off() -> Iterator[Any]:
        for number, row in enumerate(made):
            if number in (5, 15):
                shop.link.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            yield row

    shop.publish([shop.stage(cut_off())])
    assert shop.read_all_written() == BODIES


def test_sink_stages_repeated_rows_once(shop: Shop) -> None:
    """Rows are staged once, even if the answer was lost after they were written."""
    stage = staging.Stage(shop.options(), QUERY, 3)
    twice = streams.persist

    def repeated(connection: Any, work: Callable[[Connection], Any], **given: Any) -> Any:
        twice(connection, work, **given)
        return twice(connection, work, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "persist", repeated)
        counts = sink.deliver(rows(*LETTERS), shop.options(), 0, stage.send)
        shop.publish([stage.message(counts)])
    assert shop.read_all_written() == BODIES


def test_sink_with_full_memory_still_publishes_staged_rows(shop: Shop) -> None:
    """With full memory, staging is refused, but rows that are already staged are published.

    That needs no more memory.
    """
    parts = [shop.stage(rows(*LETTERS))]
    shop.link.execute("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(RedisResponseError, match="OOM"):
            shop.stage(rows("x"))
        shop.publish(parts)
    finally:
        shop.link.execute("CONFIG", "SET", "maxmemory", "0")
    assert shop.read_all_written() == BODIES


# --- deleted topics, failovers, killed drivers ----------------------------------------------------


@pytest.mark.parametrize("again", [False, True], ids=["gone", "created again"])
def test_sink_continues_after_a_topic_delete(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, again: bool
) -> None:
    """The sink continues after a topic is deleted, although an open plan has lost rows for it."""
    topics.create(Store(shop.link, shop.keys), "other", config.Topic(partitions=1))
    mixed = rows(*LETTERS) + [row._replace(topic="other") for row in rows(*LETTERS)]
    die_half_published(shop, monkeypatch, mixed)
    topics_deletion.delete(Store(shop.link, shop.keys), "other", force=True)
    if again:
        topics.create(Store(shop.link, shop.keys), "other", config.Topic(partitions=1))
    for _ in range(2):
        with pytest.raises(
            staging.NotPublishedError, match=r"rows for other partition 0 were lost .*deleted"
        ) as caught:
            shop.batch([rows(*LETTERS)])
        assert "With failOnDataLoss=false the query continues without them" in str(caught.value)
        assert shop.read_all_written() == BODIES, "the rest of the batch was published"
    caplog.clear()
    parts = [shop.stage(rows(*LETTERS))]
    shop.publish(parts, failOnDataLoss="false")
    assert "rows for other partition 0 were lost" in caplog.text
    shop.batch([rows("next")], batch=4)
    assert shop.read_all_written() == sorted([*BODIES, b"next"])
    assert shop.link.execute("EXISTS", shop.keys.stream("other", 0)) == 0


def test_sink_handles_rows_for_a_removed_partition(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topic was recreated with fewer partitions, so the other streams have no reader."""
    die_half_published(shop, monkeypatch, rows(*LETTERS))
    before = shop.read_written()
    shop.grow(1)
    parts = [shop.stage(rows(*LETTERS))]
    for _ in range(2):
        with pytest.raises(staging.NotPublishedError, match="rows for out partition 1 were lost"):
            shop.publish(parts)
    first, second = shop.read_written()
    assert len(first) > len(before[0])
    assert second == before[1]
    shop.publish(parts, failOnDataLoss="false")
    assert shop.non_empty_keys() == []


def test_sink_stages_rows_of_a_deleted_topic(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task still stages rows of a deleted topic, with the partition count that it knows.

    Publishing them would create a stream without a reader.
    """
    late = staging.Stage(shop.options(), QUERY, 3)
    counts = sink.deliver(rows(*LETTERS), shop.options(), 0, late.send)
    topics_deletion.delete(Store(shop.link, shop.keys), "out", force=True)
    late.send({("out", 0): rows("y")})
    parts = [late.message(counts)]
    with pytest.raises(staging.NotPublishedError, match="topic out no longer exists"):
        shop.publish(parts)
    sink.TopicStreamWriter(shop.options()).abort(parts, 3)
    assert shop.staged_keys() == []
    assert shop.link.execute("EXISTS", shop.keys.stream("out", 0)) == 0


def test_sink_survives_a_failover_during_the_commit(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row is lost or duplicated, although the new master lacks the last moves."""
    parts = [shop.stage(part) for part in split_into_tasks(rows(*LETTERS), 3)]
    keys = [key.decode() for key in shop.non_empty_keys()] + [
        shop.keys.stream("out", n) for n in (0, 1)
    ]
    before = {key: shop.link.execute("DUMP", key) for key in keys}
    failed_over: list[bool] = []
    real = staging.Publisher._move

    def move(publisher: Any, waiting: Any) -> None:
        real(publisher, waiting)
        if not failed_over:
            failed_over.append(True)
            shop.link.execute("DEL", *keys)
            for key, dump in before.items():
                if dump is not None:
                    shop.link.execute("RESTORE", key, 0, dump)

    monkeypatch.setattr(staging.Publisher, "_move", move)
    shop.publish(parts)
    assert failed_over
    assert shop.read_all_written() == BODIES
    assert shop.non_empty_keys() == []


def test_sink_keeps_the_proof_of_a_published_batch(shop: Shop) -> None:
    """A cluster needs the proof.

    Another node has the record, and its replica may lack the batch's end.
    """
    shop.batch(split_into_tasks(rows(*LETTERS), 2))
    proofs = shop.staged_keys()
    assert proofs
    record = shop.keys.sink(QUERY)
    plan = {key.rpartition(b":")[2].decode(): {"out": [0, 1]} for key in proofs}
    shop.link.execute("HSET", record, "plan", store.write_plan(plan))
    shop.batch([rows("next")], batch=4)
    assert shop.read_all_written() == sorted([*BODIES, b"next"])
    assert not set(proofs) & set(shop.staged_keys())


def test_sink_removes_rows_of_a_killed_driver_on_start(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its start, the sink removes rows of a killed driver before the batch is finished.

    It keeps rows of tasks of its own run.
    """
    monkeypatch.setattr(sink, "_task", Task)
    writer = sink.TopicStreamWriter(shop.options())
    writer.write(iter([batch(value=["killed"])]))
    monkeypatch.setattr(Task, "run", "another-run")
    second = writer.write(iter([batch(value=["a"])]))
    assert len(shop.staged_keys()) == 1
    third = writer.write(iter([batch(value=["b"])]))
    assert len(shop.staged_keys()) == 2, "of the same run"
    shop.publish([second, third])
    assert shop.read_all_written() == [b"a", b"b"]


def test_sink_keeps_the_decision_of_a_killed_driver(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_half_published(shop, monkeypatch, rows(*LETTERS))
    monkeypatch.setattr(sink, "_task", Task)
    writer = sink.TopicStreamWriter(shop.options())
    shop.publish([writer.write(iter([batch(value=["x"])]))])
    assert shop.read_all_written() == BODIES


# --- rows -----------------------------------------------------------------------------------------


def batch(**columns: Any) -> Any:
    return pa.RecordBatch.from_pydict(columns)


def test_sink_turns_columns_into_messages(shop: Shop) -> None:
    made = batch(
        value=["é", None],
        key=[b"\x00", None],
        headers=pa.array(
            [[{"key": "a", "value": b"1"}], None],
            pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
        ),
        fields=pa.array(
            [[("mine", b"x"), ("payload", b"no")], None], pa.map_(pa.string(), pa.binary())
        ),
        noise=[1, 2],
    )
    first, second = outgoing.to_messages(made, shop.options())
    assert first.fields == [
        *(b"payload", "é".encode(), b"key", b"\x00"),
        *(b"headers", json.dumps({"a": "1"}, separators=(",", ":")).encode(), b"mine", b"x"),
    ]
    assert second == outgoing.Row("out", None, None, "", [b"payload", b""])


def test_sink_accepts_a_map_of_headers(shop: Shop) -> None:
    kind = pa.map_(pa.string(), pa.string())
    made = batch(value=["v"], headers=pa.array([[("a", "1"), ("b", None)]], kind))
    (row,) = outgoing.to_messages(made, shop.options())
    assert json.loads(row.fields[3]) == {"a": "1", "b": ""}


def test_sink_refuses_rows_without_required_values(shop: Shop) -> None:
    with pytest.raises(ValueError, match="a row has no topic"):
        list(outgoing.to_messages(batch(value=["v"], topic=[None]), shop.options(topic="")))
    with pytest.raises(ValueError, match="a row has no value in uid"):
        list(outgoing.to_messages(batch(value=["v"], uid=[None]), shop.options(idColumn="uid")))
    with pytest.raises(MessageTooLargeError):
        list(outgoing.to_messages(batch(value=["v" * 11]), shop.options(maxMessageBytes=10)))


def test_sink_routes_rows_to_topic_and_partition(shop: Shop) -> None:
    found = outgoing.Targets(shop.options())
    row = rows("v", key=False)[0]
    assert [found.place(row, turn) for turn in range(3)] == [("out", 0), ("out", 1), ("out", 0)]
    assert found.place(row._replace(partition=1), 0) == ("out", 1)
    assert found.place(row._replace(key=b"k"), 0) == ("out", crc32_partition(b"k", 2))
    assert found.place(row._replace(dedup_id="i"), 0) == ("out", crc32_partition(b"i", 2))
    with pytest.raises(RequestRefusedError, match="partition 2 of topic"):
        found.place(row._replace(partition=2), 0)
    with pytest.raises(TopicNotFoundError, match="option partitions"):
        found.place(row._replace(topic="nowhere"), 0)


def test_sink_creates_a_topic_with_the_option(shop: Shop, store: Store) -> None:
    sink.prepare(shop.options(topic="fresh", partitions=3))
    assert topics.partition_count(store, "fresh") == 3
    sink.prepare(shop.options(topic="fresh", partitions=9))
    assert topics.partition_count(store, "fresh") == 3
    with pytest.raises(TopicNotFoundError):
        sink.prepare(shop.options(topic="nowhere"))


def test_sink_writes_an_id_once(shop: Shop) -> None:
    made = [
        outgoing.Row("out", None, None, str(number), [b"payload", b"%d" % number])
        for number in range(10)
    ]
    options = shop.options(idColumn="uid")
    for _ in range(2):
        sink.deliver(made, options, 0, partial(sink.append, options))
    assert sum(map(len, shop.read_written())) == 10


def test_sink_refuses_a_row_with_too_many_fields(shop: Shop) -> None:
    fields = pa.array([[(f"f{n}", b"x") for n in range(2000)]], pa.map_(pa.string(), pa.binary()))
    with pytest.raises(ValueError, match="more than 2,000 fields"):
        list(outgoing.to_messages(batch(value=["v"], fields=fields), shop.options()))
