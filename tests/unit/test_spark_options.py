"""The options of the Spark source and sink are read once. One error names all invalid options."""

from __future__ import annotations

import itertools
import json
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest

from streamqd import config
from streamqd.spark import offsets, options
from streamqd.spark.form import OptionsError
from streamqd.spark.offsets import ARCHIVE, EARLIEST, LATEST, Bound
from streamqd.spark.options import (
    ReadOptions,
    WriteOptions,
    of_settings,
    read_options,
    write_options,
)

URL = "redis://localhost:6379/0"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "spark-options.md"


def read(**options: object) -> ReadOptions:
    given = {"url": URL, "subscribe": "access"} | options
    return read_options({k.lower(): str(v) for k, v in given.items() if v is not None}, {})


def write(**options: object) -> WriteOptions:
    given = {"url": URL} | options
    return write_options({k.lower(): str(v) for k, v in given.items() if v is not None}, {})


def problems(**options: object) -> list[str]:
    with pytest.raises(OptionsError) as caught:
        read(**options)
    return caught.value.problems


def test_spark_options_have_their_defaults() -> None:
    found = read()
    assert found.subscribe == ("access",)
    assert found.starting is found.starting_default is found.ending is None
    assert found.fail_on_data_loss
    assert not found.headers
    assert not found.dead
    assert found.max_per_trigger == 200_000
    assert found.connection.redis == config.Redis(url=URL)


def test_read_options_are_parsed() -> None:
    found = read(
        failOnDataLoss="FALSE",
        maxOffsetsPerTrigger=10,
        minOffsetsPerTrigger=5,
        maxTriggerDelay="2m",
        minPartitions=7,
        maxRecordsPerPartition=8,
        includeHeaders="true",
        includeFields="true",
        fetchSize=9,
        fetchBytes="1MiB",
        pushdown="true",
        progressKey="p",
        timeoutMs=1500,
        retries=0,
        retryIntervalMs=20,
        controlPrefix="a",
        streamPrefix="b",
        username="u",
        passwordFile="/p",
        caFile="/a",
        certFile="/c",
        keyFile="/k",
    )
    assert (found.fail_on_data_loss, found.max_per_trigger, found.min_per_trigger) == (False, 10, 5)
    assert (found.max_trigger_delay, found.min_partitions, found.max_per_partition) == (120, 7, 8)
    assert (found.headers, found.fields, found.fetch_size, found.fetch_bytes) == (
        *(True, True),
        *(9, 1 << 20),
    )
    assert (found.pushdown, found.progress_key) == (True, "p")
    link = found.connection
    assert (link.timeout, link.retries, link.retry_interval) == (1.5, 0, 0.02)
    assert (link.control, link.streams) == ("a", "b")
    assert link.redis == config.Redis(
        url=URL,
        username="u",
        password_file=Path("/p"),
        ca_file=Path("/a"),
        cert_file=Path("/c"),
        key_file=Path("/k"),
    )


def test_redis_url_may_come_from_the_environment() -> None:
    found = read_options({"subscribe": "access"}, {"STREAMQ_URL": "unix:///run/redis.sock"})
    assert found.connection.redis.url == "unix:///run/redis.sock"


def test_options_can_be_pickled() -> None:
    found = read(startingOffsets='{"access": {"0": "5-1"}}')
    assert pickle.loads(pickle.dumps(found)) == found
    assert hash(found.connection) == hash(read().connection)


def test_options_error_can_be_pickled() -> None:
    error = OptionsError(["one", "two"])
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.problems) == ("streamq: one; two", ["one", "two"])


# --- subscriptions --------------------------------------------------------------------------------


def test_topics_are_selected_in_three_forms() -> None:
    assert read(subscribe=" b , a,b ").subscribe == ("b", "a")
    assert read(subscribe=None, subscribePattern="web.*").pattern == "web.*"
    found = read(subscribe=None, assign='{"access": [2, 0], "orders": [1]}')
    assert found.assign == (("access", 0), ("access", 2), ("orders", 1))


def test_dead_letter_topics_are_recognized() -> None:
    assert read(subscribe="access:dlq,orders:dlq").dead
    assert read(subscribe=None, subscribePattern=".*:dlq").dead
    assert read(subscribe=None, assign='{"access:dlq": [0]}').dead


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"subscribe": None}, "one of subscribe, subscribePattern and assign, or only topic"),
        ({"assign": '{"a": [0]}'}, "one of subscribe, subscribePattern and assign, or only topic"),
        ({"subscribe": "a b"}, "'a b' is not a valid topic name"),
        ({"subscribe": ","}, "contains no topic"),
        ({"subscribe": "access,access:dlq"}, "different columns"),
        ({"subscribe": None, "subscribePattern": "("}, "not a regular expression"),
        ({"subscribe": None, "assign": '{"a": 0}'}, '{"a": [0, 1]}'),
        ({"subscribe": None, "assign": '{"a": [-1]}'}, '{"a": [0, 1]}'),
        ({"subscribe": None, "assign": "[]"}, "must be a JSON object"),
        ({"url": ""}, "url is missing"),
        ({"url": "embedded:"}, "unix:///PATH"),
        ({"url": "http://x"}, "not a Redis URL"),
        ({"startingOffset": "latest"}, "did you mean startingOffsets?"),
        ({"kafka.bootstrap.servers": "x"}, "set the address with `url`"),
        ({"path": "access"}, "`subscribe`"),
        ({"failOnDataLoss": "no"}, "failOnDataLoss must be true or false"),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger must be an integer, 1 or more"),
        ({"fetchSize": "1e3"}, "fetchSize must be an integer, 1 to 100000"),
        ({"fetchBytes": "2GiB"}, "1 byte to 1 GiB"),
        ({"maxTriggerDelay": "soon"}, "maxTriggerDelay is not a duration"),
        (
            {"minOffsetsPerTrigger": 9, "maxOffsetsPerTrigger": 8},
            "minOffsetsPerTrigger must not exceed",
        ),
        ({"startingOffsets": "5"}, "not an entry id"),
        ({"startingOffsets": "{"}, "startingOffsets is not valid JSON"),
        ({"startingOffsets": '{"access": 5}'}, '{"access": {"0": …}}'),
        ({"startingOffsets": '{"access": {"0": 5}}'}, "access 0: 5 is not a valid offset"),
        ({"startingOffsetsByTimestamp": '{"access": {"0": -5}}'}, "not a time"),
        ({"startingTimestamp": "yesterday"}, "startingTimestamp 'yesterday' is not a time in unix"),
        ({"endingTimestamp": "1969-12-31"}, "endingTimestamp '1969-12-31' is not a time"),
        ({"startingOffsets": "group:"}, "not an entry id"),
        ({"startingOffsets": "archive"}, "archive requires archivePath, the directory or URL"),
        ({"archivePath": "/a", "endingOffsets": "archive"}, "endingOffsets cannot be archive"),
        ({"archivePath": "/a", "subscribe": "access:dlq"}, "dead letters reads only Redis"),
        ({"archivePath": "/a", "includeFields": "true"}, "requires includeHeaders, because"),
        ({"archivePath": "/a", "maxRecordsPerPartition": 9}, "cannot be used with archivePath"),
        (
            {
                "subscribe": None,
                "assign": '{"access": [0, 1]}',
                "startingOffsets": '{"access": {"0": "latest"}}',
            },
            "startingOffsets has no position for access 1; add it",
        ),
    ],
)
def test_invalid_spark_options_are_reported(options: dict[str, object], sentence: str) -> None:
    assert any(sentence in problem for problem in problems(**options)), problems(**options)


def test_all_wrong_options_are_reported_together() -> None:
    found = problems(subscribe=None, url="", retries="x", nonsense=1)
    assert len(found) == 4


def test_options_added_by_spark_are_ignored() -> None:
    assert read(checkpointLocation="/x", queryName="q").subscribe == ("access",)


# --- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("earliest", EARLIEST),
        ("latest", LATEST),
        ("group:hits", Bound("group", "hits")),
        ("17-3", Bound("id", (17, 3))),
    ],
)
def test_one_bound_applies_to_all_partitions(text: str, bound: Bound) -> None:
    assert read(startingOffsets=text).starting_default == bound
    assert read(endingOffsets=text).ending_default == bound


def test_each_partition_may_have_its_own_bound() -> None:
    text = '{"access": {"0": "17-3", "1": "earliest", "2": -1, "3": "group:g", "4": -2}}'
    expected = {
        ("access", 0): Bound("id", (17, 3)),
        ("access", 1): EARLIEST,
        ("access", 2): LATEST,
        ("access", 3): Bound("group", "g"),
        ("access", 4): EARLIEST,
    }
    found = read(startingOffsets=text, endingOffsets=text)
    assert found.starting == found.ending == expected


def test_checkpoint_offset_is_a_valid_start() -> None:
    positions = {("access", 0): offsets.Position((17, 3), 4711)}
    found = read(startingOffsets=json.dumps(offsets.to_json(positions)))
    assert found.starting == {("access", 0): Bound("position", positions["access", 0])}
    assert (
        offsets.resolve(found.starting["access", 0], offsets.StreamFacts())
        == positions["access", 0]
    )
    for counts in ('"x"', '{"access": 5}'):
        broken = f'{{"access": {{"0": "17-3"}}, "#": {counts}}}'
        assert "startingOffsets" in problems(startingOffsets=broken)[0]


def test_timestamps_override_offsets() -> None:
    by_time = '{"access": {"0": 1500}}'
    found = read(startingOffsets="latest", startingOffsetsByTimestamp=by_time)
    assert found.starting == {("access", 0): Bound("time", 1500)}
    found = read(endingOffsetsByTimestamp=by_time, endingTimestamp=2500)
    assert (found.ending, found.ending_default) == (None, Bound("time", 2500))


@pytest.mark.parametrize(
    ("text", "unix_ms"),
    [
        ("1795249800000", 1_795_249_800_000),
        ("2026-11-21", 1_795_219_200_000),
        ("2026-11-21T08:30", 1_795_249_800_000),
        ("2026-11-21T08:30:00Z", 1_795_249_800_000),
        ("2026-11-21T09:30:00+01:00", 1_795_249_800_000),
        ("2026-11-21T08:30:00.000001", 1_795_249_800_001),
        ("1970-01-01", 0),
    ],
)
def test_timestamp_strings_without_a_zone_are_utc(text: str, unix_ms: int) -> None:
    assert read(startingTimestamp=text).starting_default == Bound("time", unix_ms)
    each = read(endingOffsetsByTimestamp=f'{{"access": {{"0": "{text}"}}}}')
    assert each.ending == {("access", 0): Bound("time", unix_ms)}


# --- writing --------------------------------------------------------------------------------------


def test_write_options_are_parsed() -> None:
    found = write(topic="out", partitions=3, idempotent="false")
    assert (found.topic, found.partitions, found.idempotent) == ("out", 3, False)
    found = write(idColumn="uid", dedupWindow="1d", batchRows=10, batchBytes="64KiB")
    assert (found.id_column, found.dedup_window) == ("uid", 86_400)
    assert (found.batch_rows, found.batch_bytes) == (10, 65_536)
    assert write(maxMessageBytes="2MiB").max_message_bytes == 2 << 20
    assert write().max_staged_bytes == 256 << 20
    assert write(maxStagedBytes="1MiB").max_staged_bytes == 1 << 20
    assert write().commit_retention == 7 * 86_400
    assert write(commitRetention="1h").commit_retention == 3600


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"topic": "a:b"}, "not a valid topic name"),
        ({"rowOrder": "content"}, "roworder is not an option: a batch is written once"),
        ({"commitRetention": "59m"}, "commitRetention must be at least 1 h"),
        ({"dedupWindow": "0s"}, "dedupWindow must be a duration"),
        ({"batchRows": 1001}, "1 to 1000"),
    ],
)
def test_wrong_write_option_is_reported(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(OptionsError, match=sentence):
        write(**options)


@pytest.mark.parametrize(
    ("stream", "given", "sentence"),
    [
        (True, {"pushdown": "true"}, "pushdown applies only to batch reads; remove it"),
        (False, {"maxOffsetsPerTrigger": "9"}, "maxOffsetsPerTrigger applies only to streams"),
        (False, {"holdretention": "true"}, "holdRetention applies only to streams; remove it"),
    ],
)
def test_option_without_effect_on_a_read_is_refused(
    stream: bool, given: dict[str, str], sentence: str
) -> None:
    """A batch read rejects the limits for streams, because it would ignore them."""
    with pytest.raises(OptionsError, match=sentence):
        options.refuse_ignored(given, stream=stream)
    options.refuse_ignored(given, stream=not stream)
    options.refuse_ignored({"pushdown": "false"}, stream=stream)


# --- from the configuration -----------------------------------------------------------------------


def test_configuration_is_converted_to_options(tmp_path: Path) -> None:
    redis = config.Redis(
        url="rediss://h:1", username="u", password_file=Path("/p"), ca_file=Path("/c")
    )
    settings = replace(config.Settings(), redis=redis, keys=config.KeyPrefixes("a", "b"))
    found = read_options({**of_settings(settings), "subscribe": "access"}, {})
    assert found.connection.redis == redis
    assert (found.connection.control, found.connection.streams) == ("a", "b")


def test_embedded_server_url_uses_its_socket(tmp_path: Path) -> None:
    daemon = replace(config.Settings().daemon, state_dir=tmp_path)
    options = of_settings(replace(config.Settings(), daemon=daemon))
    assert options["url"].startswith("unix:///")


def test_configuration_is_used_without_a_redis_url(tmp_path: Path) -> None:
    file = tmp_path / "streamq.toml"
    file.write_text('[redis]\nurl = "rediss://elsewhere:6380/2"\nusername = "spark"\n')
    environ = {"STREAMQ_CONFIG": str(file)}

    found = read_options({"topic": "access"}, environ)
    assert (found.connection.redis.url, found.connection.redis.username) == (
        "rediss://elsewhere:6380/2",
        "spark",
    )
    assert found.subscribe == ("access",)
    own = read_options({"topic": "access", "url": "redis://h"}, environ)
    assert (own.connection.redis.url, own.connection.redis.username) == ("redis://h", None)


def test_source_refuses_the_tier_option() -> None:
    [problem] = problems(tier="all")
    assert "streamqd.spark.read_topic" in problem


def test_stream_accepts_an_archive_to_start_with() -> None:
    found = read(startingOffsets="archive", archivePath="/data/archive")
    assert (found.starting_default, found.archive) == (ARCHIVE, "/data/archive")
    each = read(startingOffsets='{"access": {"0": "archive", "1": "5-0"}}', archivePath="/a")
    assert each.starting == {("access", 0): ARCHIVE, ("access", 1): Bound("id", (5, 0))}


def test_documentation_lists_every_spark_option_and_default() -> None:
    sections = re.split(r"^##+ (.*)\n", PAGE.read_text(), flags=re.MULTILINE)
    parts = dict(zip(sections[1::2], sections[2::2], strict=True))
    told = [
        (name, default)
        for part in ("Connection", "Reading", "Writing")
        for names, defaults in re.findall(r"^\| (`[^|]+`) \|([^|]*)\|", parts[part], re.MULTILINE)
        for name, default in itertools.zip_longest(
            re.findall(r"`(\w+)`", names), defaults.strip().split(", ")
        )
        if name
    ]

    assert {name for name, _ in told} == {*options._NAMES}
    checked = [pair for pair in told if re.fullmatch(r"true|false|\d+( MiB|[md])?", str(pair[1]))]
    assert len(checked) > 20
    for name, default in checked:
        given, more = {name: str(default)}, {"group": "g"} if name == "holdRetention" else {}
        assert read(**given, **more) == read(**more), name
        assert write(**given) == write(), name
