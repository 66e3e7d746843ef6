"""Scenarios of Spark tasks and pipelines: their writes to Redis, made without Spark."""

from __future__ import annotations

from streamqd import config
from streamqd.errors import RedisUnavailableError
from streamqd.store import archives, topics
from tests.faults.scenario_runner import ScenarioContext
from tests.support.waiting import wait_until

TRIES = 5


def a_task_that_writes_rows(context: ScenarioContext) -> None:
    """Write a batch once, although tasks and commits repeat and another driver finishes it."""
    from streamqd.spark import sink, staging
    from streamqd.spark.options import write_options
    from streamqd.spark.outgoing import Row

    topics.create(context.store, "out", config.Topic(partitions=2))
    given = {"url": context.proxy.url, "topic": "out", "retryIntervalMs": 1, "batchRows": 4}
    options = write_options({name.lower(): str(value) for name, value in given.items()}, {})
    values = [b"%d" % number for number in range(20)]
    rows = [Row("out", None, value, "", [b"payload", value]) for value in values]
    for batch, made in ((3, rows), (4, [])):
        for _ in range(TRIES):
            try:
                task = staging.Stage(options, "query", batch)
                message = task.message(sink.deliver(made, options, 0, task.send))
                staging.Publisher(options, "query").commit(batch, [message])
                break
            except RedisUnavailableError:
                continue
        else:
            raise AssertionError("the task does not come to its end")
    pages = context.link.pipeline(
        [("XRANGE", context.keys.stream("out", number), "-", "+") for number in range(2)]
    )
    written = [fields[1] for page in pages for _, fields in page]
    assert sorted(written, key=int) == values


def an_archive_that_goes_on(context: ScenarioContext) -> None:
    """Take the lease in one run, advance the watermark, and release the lease."""
    from streamqd.spark.pipelines import lease

    keys = context.keys
    held = None
    for _ in range(TRIES):
        try:
            held = lease.PipelineLease(context.faulty_link, keys, "access", "archive", ttl=0.6)
            held.__enter__()
            break
        except RedisUnavailableError:
            # The lost call may have written its token, so wait until that token expires.
            wait_until(
                lambda: not context.link.execute("EXISTS", keys.pipeline("access", "archive")),
                what="the lease of the try before is over",
            )
    else:
        raise AssertionError("no lease is to be had")
    link = context.faulty_link()
    try:
        for entry in ("1-0", "2-0", "3-0"):
            for _ in range(TRIES):
                try:
                    link.run(archives.advance(keys, "access", 0, entry))
                    break
                except RedisUnavailableError:
                    continue
        wait_until(lambda: context.sent("pipeline_lease_renew"), what="it was renewed")
        held.check()
    finally:
        link.close()
        held.__exit__(None, None, None)
    # A lost release is not repeated, because the lease expires anyway.
    wait_until(
        lambda: not context.link.execute("EXISTS", keys.pipeline("access", "archive")),
        what="the lease is free",
    )
    assert context.link.execute("HGET", keys.trim("access", 0), "archived") == b"3-0"


def a_stream_that_shows_its_position(context: ScenarioContext) -> None:
    """Publish the position of a query in each trigger. A later trigger corrects a lost reply."""
    from streamqd.spark.offsets import Position
    from streamqd.spark.options import read_options
    from streamqd.spark.streams import Catalog

    given = {
        "url": context.proxy.url,
        "subscribe": "access",
        "group": "etl",
        "retryIntervalMs": "1",
    }
    catalog = Catalog(read_options({name.lower(): text for name, text in given.items()}, {}))
    stream = context.keys.stream("access", 0)
    for number in (1, 2):
        context.link.execute("XADD", stream, f"{number}-0", "payload", "x")
        for _ in range(TRIES):
            try:
                catalog.show({("access", 0): Position((number, 0), number)})
                break
            except RedisUnavailableError:
                continue
        else:
            raise AssertionError("the position is not shown")
    (flat,) = context.link.execute("XINFO", "GROUPS", stream)
    group = dict(zip(flat[::2], flat[1::2], strict=True))
    assert (group[b"name"], group[b"last-delivered-id"]) == (b"spark:etl", b"2-0")
