"""At the start, a topic keeps its settings, and a mistyped name creates no topic."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamqd import config
from streamqd.errors import ConfigError
from streamqd.registration import ensure_topics
from streamqd.store import topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store

KEYS = Keys()
CONSUMER = '[[consumers]]\ntopic = "access"\ngroup = "{group}"\nhandler = "work:obey"\n'
READS, LETTERS = CONSUMER.format(group="hits"), CONSUMER.format(group="look") + 'source = "dlq"\n'


def settings(folder: Path, text: str) -> config.Settings:
    file = folder / "streamq.toml"
    file.write_text(text)
    return config.load(file, {}, {})


def groups(link: Connection, stream: str) -> list[bytes]:
    return [flat[1] for flat in link.execute("XINFO", "GROUPS", stream)]


@pytest.mark.parametrize("text", [READS, LETTERS, f"[topics.access]\n{LETTERS}"])
def test_topic_without_configured_partitions_keeps_its_count(
    link: Connection, tmp_path: Path, text: str
):
    topics.create(Store(link, KEYS), "access", config.Topic(partitions=3))
    assert ensure_topics(link, settings(tmp_path, text)) == {"access": 3}


def test_explicit_single_partition_is_checked(link: Connection, tmp_path: Path):
    topics.create(Store(link, KEYS), "access", config.Topic(partitions=3))
    with pytest.raises(ConfigError, match="1 is less than the 3 registered"):
        ensure_topics(link, settings(tmp_path, f"[topics.access]\npartitions = 1\n{READS}"))


@pytest.mark.parametrize(
    "text", [READS + LETTERS, f"[topics.access]\npartitions = 2\n{LETTERS}"], ids=["read", "stated"]
)
def test_dead_letter_consumer_creates_its_groups(link: Connection, tmp_path: Path, text: str):
    counts = ensure_topics(link, settings(tmp_path, text))
    assert ensure_topics(link, settings(tmp_path, text)) == counts, "it may be repeated"
    for number in range(counts["access"]):
        assert groups(link, KEYS.dlq("access", number)) == [b"look@dlq"]
        assert groups(link, KEYS.retry_stream("access", number, "look@dlq")) == [b"look@dlq"]
    assert ("hits" in text) == (link.execute("EXISTS", KEYS.stream("access", 0)) == 1), (
        "a reader of letters leaves the partition alone"
    )


def test_dead_letter_consumer_creates_no_topic(link: Connection, tmp_path: Path):
    with pytest.raises(ConfigError) as raised:
        ensure_topics(link, settings(tmp_path, LETTERS))
    (problem,) = raised.value.problems
    assert "dead letters of access" in problem
    assert "\n" not in problem
    assert topics.partition_count(Store(link, KEYS), "access") is None
    assert topics.names(Store(link, KEYS)) == []


def test_dead_letter_consumer_respects_its_start_position(link: Connection, tmp_path: Path):
    topics.create(Store(link, KEYS), "access", config.Topic(partitions=1))
    last = link.execute("XADD", KEYS.dlq("access", 0), "*", "payload", "x")
    late = LETTERS.replace("look", "late") + 'start = "latest"\n'
    ensure_topics(link, settings(tmp_path, LETTERS + late))
    info = link.execute("XINFO", "GROUPS", KEYS.dlq("access", 0))
    told = [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in info]
    found = {each[b"name"]: each[b"last-delivered-id"] for each in told}
    assert found == {b"late@dlq": last, b"look@dlq": b"0-0"}
