"""All mistakes in a configuration are reported together, each with its TOML path and a remedy."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamqd import config
from streamqd.config import secrets
from streamqd.config.checks import check
from streamqd.config.problems import Problems
from streamqd.errors import ConfigError, RedisUnavailableError
from streamqd.model import Backoff, RetryPolicy

NOTHING: dict[str, str] = {}
WORK = """
[[consumers]]
topic = "access"
group = "hits"
handler = "weblog:count_hit"
"""


class Place:
    """A directory with a configuration file, environment variables and overrides."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file = directory / "streamq.toml"

    def load(
        self,
        text: str = "",
        overrides: dict[str, str] | None = None,
        environ: dict[str, str] | None = None,
        mode: int = 0o644,
    ) -> config.Settings:
        self.file.write_text(text)
        self.file.chmod(mode)
        return config.load(self.file, overrides or {}, environ or {})

    def problems(self, text: str = "", *args: Any, **kwargs: Any) -> list[str]:
        with pytest.raises(ConfigError) as raised:
            self.load(text, *args, **kwargs)
        return raised.value.problems

    def problem(self, text: str = "", *args: Any, **kwargs: Any) -> str:
        """Return the problem, which must be the only one."""
        (found,) = self.problems(text, *args, **kwargs)
        return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# --- reading -------------------------------------------------------------------------------------


def test_empty_config_file_means_the_defaults(place: Place) -> None:
    settings = place.load()
    assert settings.redis == config.Redis()
    assert settings.daemon.instance == socket.gethostname()
    assert settings.daemon.lease_ttl == 15.0
    assert settings.daemon.crash_backoff == Backoff("exponential", 0.5, 60.0, "full")
    assert settings.daemon.state_dir == place.directory / "var"
    assert settings.base_dir == place.directory
    assert settings.source == str(place.file)
    assert settings.topics == {}
    assert settings.consumers == ()


def test_missing_default_file_means_the_defaults() -> None:
    settings = config.load(None, {}, NOTHING)
    assert settings.source == "defaults"
    assert settings.base_dir == Path.cwd()
    assert settings.daemon.state_dir == Path.cwd() / "var"


def test_config_file_is_named_by_the_environment(place: Place) -> None:
    place.load('[daemon]\nfleet = "blue"')
    assert config.load(None, {}, {"STREAMQ_CONFIG": str(place.file)}).daemon.fleet == "blue"


def test_config_reads_a_whole_file(place: Place) -> None:
    settings = place.load(
        """
        [redis]
        url = "rediss://cache.example:6380/2"
        connect_timeout = "500ms"
        allow_eviction = true

        [daemon]
        instance = "web-1"
        state_dir = "/var/lib/streamq"
        handlers = ["weblog", "shop.handlers"]
        lease_ttl = 20
        max_message_bytes = "4MB"
        crash_backoff = { max = "10s" }

        [http]
        bind = "unix:./run/http.sock"
        hosts = ["metrics.example.com", "proxy"]

        [log]
        format = "json"

        [keys]
        control = "mq"
        streams = "s"

        [topics.access]
        partitions = 4
        retention = { max_age = "24h", max_length = 1000 }

        [topics."shop.orders"]

        [pipelines."shop.orders"]
        schema = "id long, at timestamp"
        event_time = "at"

        [[consumers]]
        topic = "access"
        group = "hits"
        handler = "weblog:count_hit"
        timeout = "30s"
        hard_timeout = "1m"
        max_attempts = 0
        backoff = { kind = "fixed", base = "2s", jitter = "none" }
        retry_on = ["OSError", "requests.HTTPError", "OSError"]
        retry_max_age = "1h"
        max_rss = "256MiB"
        dlq_error = "class"

        [[consumers]]
        topic = "mails"
        group = "send"
        """
    )
    assert settings.redis.url == "rediss://cache.example:6380/2"
    assert settings.redis.connect_timeout == 0.5
    assert settings.redis.allow_eviction is True
    assert settings.daemon.state_dir == Path("/var/lib/streamq")
    assert settings.daemon.handlers == ("weblog", "shop.handlers")
    assert settings.daemon.lease_ttl == 20.0
    assert settings.daemon.max_message_bytes == 4_000_000
    assert settings.daemon.crash_backoff == Backoff("exponential", 0.5, 10.0, "full")
    assert settings.http.address == place.directory / "run/http.sock"
    assert settings.http.hosts == ("metrics.example.com", "proxy")
    assert settings.topics["access"].retention == config.Retention(86_400.0, 1000)
    assert settings.topics["access"].explicit == {"partitions", "retention"}
    assert settings.topics["shop.orders"] == config.Topic()
    assert settings.pipelines == {"shop.orders": config.Pipeline("id long, at timestamp", "at")}
    hits, send = settings.consumers
    assert hits.policy == RetryPolicy(
        max_attempts=0,
        max_crashes=3,
        backoff=Backoff("fixed", 2.0, 300.0, "none"),
        max_age=3600.0,
        retry_on=("OSError", "requests.HTTPError"),
        dead_on=(),
    )
    assert (hits.timeout, hits.hard_timeout, hits.max_rss) == (30.0, 60.0, 256 << 20)
    assert (send.topic, send.handler, send.timeout) == ("mails", "", None)
    # If only a consumer names a topic, the topic has no configured number of partitions.
    assert settings.topics["mails"].explicit == frozenset()


def test_settings_are_immutable(place: Place) -> None:
    with pytest.raises(AttributeError):
        place.load().daemon.fleet = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ('timeout = "none"', None),
        ("timeout = 5", 5.0),
    ],
)
def test_none_disables_an_optional_setting(place: Place, setting: str, value: object) -> None:
    assert place.load(WORK + setting).consumers[0].timeout == value


@pytest.mark.parametrize(
    ("bind", "address"),
    [
        ("", None),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:9464", ("::1", 9464)),
        ("localhost:80", ("localhost", 80)),
        ("unix:/run/s.sock", Path("/run/s.sock")),
    ],
)
def test_http_bind_addresses_are_parsed(place: Place, bind: str, address: object) -> None:
    assert place.load(f'[http]\nbind = "{bind}"').http.address == address


# --- the file itself -----------------------------------------------------------------------------


def test_missing_config_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        config.load(tmp_path / "no.toml", {}, NOTHING)
    assert raised.value.problems == [
        f"{tmp_path}/no.toml: file not found; pass another with --config"
    ]


def test_unreadable_config_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r": cannot be read \(Is a directory\)$"):
        config.load(tmp_path, {}, NOTHING)


def test_invalid_toml_error_names_line_and_column(place: Place) -> None:
    found = place.problem("[daemon]\nfleet = = 1\n")
    assert found.startswith(f"{place.file}:2:9: not valid TOML: ")
    assert "\n" not in found


def test_config_file_that_is_not_utf8_is_an_error(place: Place) -> None:
    place.file.write_bytes(b"[daemon]\n# caf\xe9\n")
    with pytest.raises(ConfigError, match=r"streamq\.toml:2: not UTF-8 text"):
        config.load(place.file, {}, NOTHING)


def test_oversized_config_file_is_an_error(place: Place) -> None:
    assert "larger than 4194304 bytes" in place.problem("#" * (5 << 20))


def test_file_writable_by_all_users_is_refused(place: Place) -> None:
    assert "any user may write this file" in place.problem(mode=0o666)


# --- every single mistake ------------------------------------------------------------------------

MISTAKES = [
    ("[demon]", "demon: unknown setting; did you mean daemon?"),
    ('[daemon]\nlease_tll = "3s"', "did you mean daemon.lease_ttl?"),
    ('[daemon]\nlease-ttl = "3s"', "did you mean daemon.lease_ttl?"),
    ('lease_ttl = "3s"', "lease_ttl: unknown setting here; lease_ttl belongs to [daemon]"),
    ("[log]\nmax_attempts = 3", "max_attempts belongs to [[consumers]]"),
    ("[log]\nx = 3", "log.x: unknown setting; the settings here are format, level"),
    ("daemon = 3", "daemon: 3 is not a table [daemon]"),
    ('[daemon]\nlease_ttl = "soon"', 'daemon.lease_ttl: "soon" is not a duration (write a number'),
    ("[daemon]\nlease_ttl = true", "daemon.lease_ttl: true is not a duration"),
    ('[daemon]\nlease_ttl = "10ms"', '"10ms" is too small (minimum: "1s")'),
    ('[daemon]\nlease_ttl = "2h"', '"2h" is too large (maximum: "1h")'),
    ("[daemon]\nlease_ttl = nan", "is out of range for a duration"),
    ('[daemon]\nmax_message_bytes = "1M"', '"1M" is not a size'),
    ('[daemon]\nmax_message_bytes = "1GiB"', '"1GiB" is too large (maximum: "512MiB")'),
    ('[daemon]\nweight = "2"', 'daemon.weight: "2" must be an integer'),
    ("[daemon]\nweight = 2.0", "daemon.weight: 2.0 must be an integer"),
    ("[daemon]\nweight = 0", "daemon.weight: 0 is too small (minimum: 1)"),
    ("[daemon]\nfleet = 3", "daemon.fleet: 3 must be a string in quotes"),
    ('[daemon]\nfleet = "a b"', 'daemon.fleet: "a b" is not valid (use 1 to 64 of A-Z a-z 0-9'),
    ('[daemon]\ninstance = "a/b"', 'daemon.instance: "a/b" is not valid'),
    ('[daemon]\nhandlers = "weblog"', 'daemon.handlers: "weblog" must be a list in brack'),
    ('[daemon]\nhandlers = ["web-log"]', 'contains "web-log" (write the name of a Python module'),
    ("[daemon]\nhandlers = [1]", "contains 1 (write the name of a Python module"),
    ("[daemon]\nstate_dir = 3", "daemon.state_dir: 3 must be a path"),
    ('[daemon]\nstate_dir = ""', 'daemon.state_dir: "" must be a path'),
    ('[daemon]\nstate_dir = "streamq.toml"', "streamq.toml is not a directory"),
    ('[daemon]\ncrash_backoff = "1s"', 'daemon.crash_backoff: "1s" is not a table'),
    ('[daemon]\ncrash_backoff = { bas = "1s" }', "did you mean daemon.crash_backoff.base?"),
    (
        '[daemon]\ncrash_backoff = { max = "0.1s" }',
        'daemon.crash_backoff.max: "100ms" is shorter than base ("500ms")',
    ),
    ('[redis]\nallow_eviction = "yes"', "must be true or false"),
    ('[redis]\nusername = "a\\u0007"', "must not contain control characters"),
    ('[log]\nformat = "jsn"', '"jsn" is not one of "auto", "text", "json"; did you mean "json"?'),
    ('[log]\nlevel = "loud"', 'is not one of "debug", "info", "warning", "error"'),
    ('[http]\nbind = "9464"', 'http.bind: "9464" is not a valid address such as "HOST:PORT"'),
    ('[http]\nbind = "127.0.0.1:70000"', "is not a valid address"),
    ('[http]\nbind = "unix:"', "is not a valid socket address"),
    (f'[http]\nbind = "unix:/{"x" * 107}"', "is not a valid socket address"),
    (
        '[http]\nhosts = ["a.example:80"]',
        'contains "a.example:80" (write names of hosts without a port',
    ),
    ('[keys]\ncontrol = "{mq}"', 'keys.control: "{mq}" is not valid'),
    ('[keys]\ncontrol = "x"\nstreams = "x:retry"', "overlap"),
    ('[keys]\ncontrol = "same"\nstreams = "same"', "overlap"),
    ("topics = 3", "topics: must be a table"),
    ("topics.access = 3", "topics.access: 3 is not a table [topics.access]"),
    ("pipelines = 3", "pipelines: must be a table [pipelines.NAME]"),
    ('[pipelines."a b"]', 'pipelines."a b": "a b" is not a valid topic name'),
    ("[pipelines.a]\nschema = 3", "pipelines.a.schema: 3 must be a string"),
    ('[pipelines.a]\nevent_time = "at"', "pipelines.a.event_time: needs a schema"),
    ('[pipelines.a]\ntimes = ["at seconds"]', "pipelines.a.times: needs a schema"),
    ('[pipelines.a]\ncodec = "avro"', 'pipelines.a.codec: "avro" is not one of "json", "msgpack"'),
    ('[pipelines.a]\nschema = "at date"\ntimes = ["at"]', "write a column and a unit or a"),
    (
        '[pipelines.a]\nschema = "at timestamp"\ntimes = ["at seconds", "at milliseconds"]',
        'pipelines.a.times: names "at" twice; remove one of them',
    ),
    (
        '[pipelines.a]\nschema = "id long, that timestamp"\nevent_time = "at"',
        'pipelines.a.event_time: "at" is not a timestamp or date column of schema; name',
    ),
    (
        '[pipelines.a]\nschema = "at long, b date"\nevent_time = "at"',
        '"at" is not a timestamp or date',
    ),
    ('[topics.a]\nevent_time = "at"', "event_time belongs to [pipelines.NAME]"),
    ('[topics."a b"]', 'topics."a b": "a b" is not a valid topic name'),
    (f"[topics.{'x' * 65}]", "is not a valid topic name (use 1 to 64"),
    ("[topics.access]\npartitions = 0", "topics.access.partitions: 0 is too small"),
    ("[topics.access]\npartitions = 5000", "5000 is too large (maximum: 4096)"),
    ('[topics."a.b"]\npartition = 2', 'did you mean topics."a.b".partitions?'),
    ("[topics.access]\nretention = { max_age = 0 }", "0 is too small (minimum:"),
    ("[topics.access]\nretention = { max_length = -1 }", "-1 is too small"),
    (
        "[topics.access]\nretention = { max_bites = 1 }",
        "topics.access.retention.max_bites: unknown setting",
    ),
    ('[topics.access]\narchive = "yes"', '"yes" is not one of'),
    ("[topics.access]\nmax_length = 1", "max_length belongs to retention of a topic"),
    (
        '[topics.access]\nretention = { max_age = "2h", drop_unacked_after = "1h" }',
        "topics.access.retention.drop_unacked_after: must be at least max_age",
    ),
    (
        "[topics.access]\nretention = { max_length = 10, drop_unacked_above = 9 }",
        "topics.access.retention.drop_unacked_above: must be at least max_length",
    ),
    (
        '[topics.access]\nretention = { ack_policy = "drop" }',
        '"drop" is not one of "keep", "delete"',
    ),
    ("consumers = 3", "consumers: must be written as [[consumers]]"),
    ("[consumers]", "consumers: must be written as [[consumers]], with two brackets"),
    ("consumers = [3]", "consumers[0]: 3 is not a table"),
    (WORK + "prefetch_max = 0", "consumers[0].prefetch_max: 0 is too small (minimum: 1)"),
    (
        WORK + "prefetch_max = 257",
        "consumers[0].prefetch_max: 257 is too large (maximum: 256)",
    ),
    (WORK + "prefetch_bytes = 0", '(minimum: "1B")'),
    (
        WORK + "max_attempts = -1",
        "consumers[0].max_attempts: -1 is too small (minimum: 0)",
    ),
    (WORK + 'max_attempts = "none"', '"none" must be an integer'),
    (WORK + 'start = "first"', '"first" is not one of "earliest", "latest"'),
    (WORK + 'timeout = "0s"', "consumers[0].timeout"),
    (
        WORK + 'timeout = "30s"\nhard_timeout = "30s"',
        'consumers[0].hard_timeout: "30s" is not longer than timeout ("30s")',
    ),
    (WORK + 'retry_on = ["Some Error"]', "write the names of exception classes"),
    (WORK + 'on_error = "hold"', 'consumers[0].on_error: "hold" is not one of "requeue", "block"'),
    (WORK + 'on_error = "block"\nconcurrency = 4', 'remove concurrency, or use "hold-key"'),
    (
        WORK + 'on_error = "hold-key"\nconcurrency = 4\norder = "none"',
        'consumers[0].on_error: "hold-key" requires order = "key", not "none"',
    ),
    (WORK + 'on_error = "block"\nbreaker = { failures = 3 }', "set max_attempts = 0 to wait"),
    (WORK + 'breaker = { on = ["a b"] }', 'consumers[0].breaker.on: ["a b"] contains "a b"'),
    (
        WORK + 'dead_on = ["OSError"]\nbreaker = { failures = 3, on = ["OSError"] }',
        "consumers[0].dead_on: OSError must not be in both dead_on and breaker.on",
    ),
    (WORK + "held_max = 1", "consumers[0].held_max: 1 is too small (minimum: 2)"),
    (
        WORK + "flood_guard = { share = 1.5 }",
        "flood_guard.share: 1.5 is too large (maximum: 1)",
    ),
    (WORK + 'flood_guard = { share = "0.5" }', "must be a number without quotes"),
    (WORK + "flood_guard = { share = true }", "must be a number without quotes"),
    (
        WORK + 'retry_on = ["A", "B"]\ndead_on = ["B"]',
        "consumers[0].dead_on: B must not be in both dead_on and retry_on",
    ),
    (WORK + 'backoff = { kind = "cubic" }', 'consumers[0].backoff.kind: "cubic" is not one of'),
    (WORK + 'backoff = { base = "10m" }', 'consumers[0].backoff.max: "5m" is shorter than base'),
    (WORK + 'dlq_error = "all"', 'is not one of "none", "class", "message", "traceback"'),
    (WORK.replace("weblog:count_hit", "weblog.count_hit"), 'write "module:function"'),
    (
        WORK.replace("weblog:count_hit", ""),
        'consumers[0].handler: is missing; write handler = "mod',
    ),
    (WORK.replace('"access"', '"a/b"'), 'consumers[0].topic: "a/b" is not valid'),
    (WORK.replace('"hits"', '"hits@dlq"'), 'consumers[0].group: "hits@dlq" is not valid'),
    (
        WORK.replace('topic = "access"', ""),
        "consumers[0].topic: is missing, but every consumer needs",
    ),
    (WORK.replace('group = "hits"', ""), "consumers[0].group: is missing"),
    (WORK + WORK, "already reads access as group hits; choose another group"),
]


@pytest.mark.parametrize(("text", "said"), MISTAKES, ids=[said[:50] for _, said in MISTAKES])
def test_config_problem_is_one_sentence(place: Place, text: str, said: str) -> None:
    found = place.problem(text)
    assert said in found
    assert "\n" not in found


def test_config_reports_all_mistakes_together(place: Place) -> None:
    text = '[daemon]\nweight = 0\nfleat = "x"\n[log]\nlevel = "x"\n' + WORK + "max_crashes = -1"
    found = place.problems(text, environ={"STREAMQ_HTTP__BIND": "x"})
    assert [each.partition(":")[0] for each in found] == [
        "daemon.weight",
        "daemon.fleat",
        "log.level",
        "consumers[0].max_crashes",
        "http.bind (STREAMQ_HTTP__BIND)",
    ]


def test_invalid_value_causes_no_second_problem(place: Place) -> None:
    text = WORK + 'timeout = "soon"\nhard_timeout = "1ms"'
    assert place.problem(text).startswith("consumers[0].timeout:")


def test_consumer_numbers_survive_an_invalid_consumer(place: Place) -> None:
    bad = '[[consumers]]\ntopic = "t"\n'
    found = place.problems(bad + WORK + WORK + "max_age = -1")
    assert any(each.startswith("consumers[2].max_age: ") for each in found)
    assert any(each.startswith("consumers[2]: consumers[1] (") for each in found)


def test_problem_of_a_consumer_names_its_topic_group_and_line(place: Place) -> None:
    """A problem of a consumer names its topic, group and line.

    `consumers[13]` alone is hard to find in a file.
    """
    other = WORK.replace('"hits"', '"bills"')
    found = place.problem(f"# a remark\n{WORK}\n[daemon]\n\n{other}max_attempts = -1")
    assert re.fullmatch(r"consumers\[1\].max_attempts: .* \(access/bills, \S+:11\)", found), found

    whole = place.problem(WORK.replace("[[consumers]]", "[[ 'consumers' ]]").replace("hits", "a/b"))
    assert re.fullmatch(r"consumers\[0\].group: .* \(\S+\.toml:2\)", whole), whole


def test_problem_lines_ignore_text_that_looks_like_a_consumer(place: Place) -> None:
    """A `[[consumers]]` inside a string does not shift the line that is reported."""
    text = f'[daemon]\ninstance = """\n[[consumers]]\n"""\n{WORK}max_attempts = -1'
    found = next(each for each in place.problems(text) if each.startswith("consumers[0]"))
    assert re.search(r"\(access/hits, \S+\.toml\)$", found), found


def test_config_error_has_one_line_per_problem(place: Place) -> None:
    place.file.write_text("[daemon]\nweight = 0\nmax_partitions = -1")
    with pytest.raises(ConfigError) as raised:
        config.load(place.file, {}, NOTHING)
    assert len(str(raised.value).splitlines()) == 2


def test_unusable_host_name_requires_an_instance_name() -> None:
    problems = Problems()
    check(config.Settings(daemon=config.Daemon(instance="bad host")), problems, NOTHING)
    assert problems.sentences == [
        (
            'daemon.instance: the host name "bad host" is not a valid instance name;'
            " set daemon.instance"
        )
    ]


def test_instance_name_reserved_for_a_command_is_refused() -> None:
    problems = Problems()
    check(config.Settings(daemon=config.Daemon(instance="group-reset")), problems, NOTHING)
    assert problems.sentences == ["daemon.instance: group-reset is reserved for commands"]


# --- precedence ----------------------------------------------------------------------------------


def test_settings_follow_the_order_of_precedence(place: Place) -> None:
    text = '[daemon]\nfleet = "file"\nlease_ttl = "20s"\ndrain_timeout = "21s"\n'
    environ = {"STREAMQ_DAEMON__FLEET": "env", "STREAMQ_DAEMON__LEASE_TTL": "30s"}
    daemon = place.load(text, {"daemon.fleet": "line"}, environ).daemon
    assert (daemon.fleet, daemon.lease_ttl, daemon.drain_timeout) == ("line", 30.0, 21.0)
    assert daemon.boot_timeout == 60.0


@pytest.mark.parametrize(
    ("name", "text", "section", "setting", "value"),
    [
        ("STREAMQ_REDIS__URL", "redis://localhost:1/0", "redis", "url", "redis://localhost:1/0"),
        ("STREAMQ_REDIS__URL", '"redis://localhost:1/0"', "redis", "url", "redis://localhost:1/0"),
        ("STREAMQ_REDIS__ALLOW_EVICTION", "true", "redis", "allow_eviction", True),
        ("STREAMQ_DAEMON__LEASE_TTL", "20", "daemon", "lease_ttl", 20.0),
        ("STREAMQ_DAEMON__LEASE_TTL", "1m", "daemon", "lease_ttl", 60.0),
        ("STREAMQ_DAEMON__LEASE_TTL", '"1m"', "daemon", "lease_ttl", 60.0),
        ("STREAMQ_DAEMON__INSTANCE", "42", "daemon", "instance", "42"),
        ("STREAMQ_DAEMON__WEIGHT", "3", "daemon", "weight", 3),
        ("STREAMQ_DAEMON__HANDLERS", "weblog, shop", "daemon", "handlers", ("weblog", "shop")),
        ("STREAMQ_DAEMON__HANDLERS", '["weblog"]', "daemon", "handlers", ("weblog",)),
        ("STREAMQ_DAEMON__HANDLERS", "", "daemon", "handlers", ()),
        ("STREAMQ_HTTP__BIND", "", "http", "bind", ""),
        ("STREAMQ_KEYS__CONTROL", "mq", "keys", "control", "mq"),
    ],
)
def test_environment_variables_set_settings(
    place: Place, name: str, text: str, section: str, setting: str, value: object
) -> None:
    assert getattr(getattr(place.load(environ={name: text}), section), setting) == value


@pytest.mark.parametrize(
    "at",
    [
        *("at timestamp", "at: DATE", "`at`  TIMESTAMP NOT NULL", "`at`timestamp"),
        *("at /* of the sender */ timestamp", "at/**/date"),
    ],
)
def test_event_time_column_ignores_case(place: Place, at: str) -> None:
    text = f'[pipelines.a]\nschema = "id long,{at}, b int"\nevent_time = "at"'
    assert place.load(text).pipelines["a"].event_time == "at"


def test_environment_variables_set_nested_tables(place: Place) -> None:
    environ = {
        "STREAMQ_DAEMON__CRASH_BACKOFF__BASE": "2s",
        "STREAMQ_TOPICS__SHOP_ORDERS__PARTITIONS": "8",
        "STREAMQ_TOPICS__SHOP_ORDERS__RETENTION__MAX_AGE": "1h",
        "STREAMQ_PIPELINES__SHOP_ORDERS__SCHEMA": "id long",
    }
    text = '[topics."shop.orders"]\npartitions = 2\n[pipelines."shop.orders"]'
    settings = place.load(text, environ=environ)
    assert settings.pipelines["shop.orders"].schema == "id long"
    assert settings.daemon.crash_backoff.base == 2.0
    assert settings.topics["shop.orders"].partitions == 8
    assert settings.topics["shop.orders"].retention.max_age == 3600.0
    assert settings.topics["shop.orders"].explicit == {"partitions", "retention"}


def test_overrides_are_dotted_toml_keys(place: Place) -> None:
    overrides = {'topics."a.b".partitions': "3", "log.level": "debug", "daemon.weight": "2"}
    settings = place.load(overrides=overrides)
    assert settings.topics["a.b"].partitions == 3
    assert settings.log.level == "debug"
    assert settings.daemon.weight == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("STREAMQ_DAEMON__LEASE_TLL", "did you mean STREAMQ_DAEMON__LEASE_TTL?"),
        ("STREAMQ_URL", "did you mean STREAMQ_REDIS__URL?"),
        ("STREAMQ_X", "names are STREAMQ_SECTION__SETTING"),
        ("STREAMQ_DAEMON", "STREAMQ_DAEMON: unknown setting"),
        ("STREAMQ_", "STREAMQ_: unknown setting"),
        ("STREAMQ_TOPICS__ACCESS__PARTITIONS", "add the topic to the file"),
        ("STREAMQ_CONSUMERS__0__TIMEOUT", "consumers can be configured only in the file"),
    ],
)
def test_unknown_environment_variables_are_problems(place: Place, name: str, said: str) -> None:
    found = place.problem(environ={name: "1"})
    assert found.startswith(f"{name}: ")
    assert said in found


def test_other_environment_variables_are_ignored(place: Place) -> None:
    place.load(environ={"STREAMQD": "1", "PATH": "/bin", "MY_STREAMQ_X": "1"})


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("weight", "not a setting of the form SECTION.NAME"),
        ("daemon.", "not a setting of the form SECTION.NAME"),
        ("daemon.weigth", "daemon.weigth (command line): unknown setting; did you mean"),
        ("daemon.weight", 'daemon.weight (command line): "x" must be an integer'),
        ("consumers.timeout", "consumers can be configured only"),
    ],
)
def test_invalid_overrides_are_problems(place: Place, key: str, said: str) -> None:
    assert said in place.problem(overrides={key: "x"})


def test_environment_value_cannot_inject_other_settings(place: Place) -> None:
    found = place.problem(environ={"STREAMQ_DAEMON__WEIGHT": "1\nfleet = 2"})
    assert found.startswith("daemon.weight (STREAMQ_DAEMON__WEIGHT): ")


# --- Redis ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "embedded:",
        "redis://localhost",
        "redis://localhost:6379",
        "redis://localhost:6379/",
        "rediss://user@10.0.0.1:6379/3",
        "rediss://[::1]:6380/0",
        "unix:///run/redis.sock",
        "unix:///run/redis.sock?db=2",
        "redis+sentinel://127.0.0.1,localhost:26380/mymaster/1",
        "rediss+cluster://h:7000,i:7001",
    ],
)
def test_valid_redis_urls_are_accepted(place: Place, url: str) -> None:
    assert place.load(f'[redis]\nurl = "{url}"').redis.url == url


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "is not a Redis URL (write"),
        ("localhost:6379", "is not a Redis URL (write"),
        ("http://localhost", "is not a Redis URL (write"),
        ("embedded://x", "is not a Redis URL (write"),
        ("redis://", "has no host"),
        ("redis://:6379/0", "has no host"),
        ("redis://localhost:x/0", "invalid host or port"),
        ("redis://localhost:0/0", "port 0"),
        ("redis://[::1", "invalid host or port"),
        ("redis://localhost:1/first", "must end with a database number"),
        (
            "redis://localhost:1/0?ssl_cert_reqs=none",
            'contains the parameter "ssl_cert_reqs", but the only parameter is db',
        ),
        ("redis://localhost:1/0?socket_timeout=1&db=1", 'the parameter "socket_timeout"'),
        ("redis://localhost:1?db=first", "must have a database number"),
        ("redis://localhost:1/0#x", "contains a fragment (#), but the only parameter is db"),
        ("unix://run/redis.sock", "with three slashes"),
        ("unix:redis.sock", "with three slashes"),
        (f"unix:///{'x' * 107}", "(maximum: 107)"),
    ],
)
def test_invalid_redis_urls_are_problems(place: Place, url: str, said: str) -> None:
    found = place.problem(f'[redis]\nurl = "{url}"')
    assert found.startswith("redis.url: ")
    assert said in found


SECRET_URL = "redis://me:s3cret@localhost:6379/0"


def test_password_in_the_file_requires_private_mode(place: Place) -> None:
    text = f'[redis]\nurl = "{SECRET_URL}"'
    assert "chmod 600" in place.problem(text, mode=0o640)
    assert "mode 0604" in place.problem(text, mode=0o604)
    assert place.load(text, mode=0o600).redis.url == SECRET_URL
    assert place.load(text, mode=0o400).redis.url == SECRET_URL


def test_password_is_accepted_from_environment_but_not_arguments(
    place: Place,
) -> None:
    assert place.load(environ={"STREAMQ_REDIS__URL": SECRET_URL}).redis.url == SECRET_URL
    found = place.problem(overrides={"redis.url": SECRET_URL})
    assert "other users can see a password on the command line" in found


@pytest.mark.parametrize(
    "url",
    [
        SECRET_URL,
        "redis://me:s3cret@h:bad/0",
        "redis://me:s3cret@",
        "redis://me:s3cret/@h",
        "http://me:s3cret@h",
        "redis://me:s3cret@h:1/0?password=s3cret",
        "s3cret",
    ],
)
def test_config_problems_never_contain_a_password(place: Place, url: str) -> None:
    for overrides in ({"redis.url": url}, {}):
        text = "" if overrides else f'[redis]\nurl = "{url}"'
        assert "s3cret" not in "\n".join(place.problems(text, overrides))
    assert "s3cret" not in "\n".join(place.problems('[redis]\nurl = ["s3cret"]'))


def test_password_file_is_readable_by_its_owner_only(place: Place) -> None:
    text = '[redis]\nurl = "redis://localhost"\npassword_file = "secret"'
    secret = place.directory / "secret"
    assert "cannot be read (No such file or directory)" in place.problem(text)
    secret.touch(0o600)
    assert "is empty" in place.problem(text)
    secret.write_text("s3cret\n")
    assert place.load(text).redis.password_file == secret
    for mode in (0o640, 0o604, 0o610):
        secret.chmod(mode)
        assert f"other users may read {secret} (chmod 600)" in place.problem(text)
    # The mode of a systemd credential looks as if its group could read it.
    assert place.load(text, environ={"CREDENTIALS_DIRECTORY": str(place.directory)})


def test_second_password_is_refused(place: Place) -> None:
    secret = place.directory / "secret"
    secret.write_text("s3cret")
    secret.chmod(0o600)
    text = f'[redis]\nurl = "{SECRET_URL}"\npassword_file = "secret"'
    assert "but password_file is also set" in place.problem(text, mode=0o600)


def test_tls_files_require_tls_and_are_set_together(place: Place) -> None:
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (place.directory / name).write_text("PEM")
        (place.directory / name).chmod(0o640)
    pair = 'cert_file = "cert.pem"\nkey_file = "key.pem"\nca_file = "ca.pem"\n'
    redis = place.load('[redis]\nurl = "rediss://h"\n' + pair).redis
    assert redis.ca_file == place.directory / "ca.pem"
    found = place.problem('[redis]\nurl = "redis://localhost"\nca_file = "ca.pem"')
    assert "requires TLS; write rediss://" in found
    found = place.problem('[redis]\nurl = "rediss://h"\ncert_file = "cert.pem"')
    assert found == "redis.cert_file: also requires redis.key_file"
    found = place.problem('[redis]\nurl = "rediss://h"\nkey_file = "key.pem"')
    assert found == "redis.key_file: also requires redis.cert_file"
    (place.directory / "key.pem").chmod(0o644)
    assert "chmod o-r" in place.problem('[redis]\nurl = "rediss://h"\n' + pair)


def test_embedded_server_refuses_credentials(place: Place) -> None:
    found = place.problem('[redis]\nusername = "me"')
    assert found.startswith('redis.username: cannot be used with redis.url = "embedded:"')


def test_embedded_url_is_a_socket_in_state_dir(place: Place) -> None:
    settings = place.load()
    assert config.redis_url(settings) == f"unix://{place.directory}/var/redis.sock"
    assert config.resolve_url(settings).redis.url == config.redis_url(settings)
    assert config.claim_socket_path(settings, NOTHING) == place.directory / "var/redis.sock"
    other = place.load('[redis]\nurl = "redis://localhost:1/2"')
    assert config.redis_url(other) == "redis://localhost:1/2"


def test_embedded_url_is_quoted(place: Place) -> None:
    settings = place.load('[daemon]\nstate_dir = "my var?"')
    assert config.redis_url(settings).endswith("/my%20var%3F/redis.sock")


@pytest.fixture
def runtime() -> Iterator[Path]:
    """Return a directory with a short path, because those of pytest can be too long."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_deep_state_dir_has_one_short_socket_path(place: Place, runtime: Path) -> None:
    settings = place.load(f'[daemon]\nstate_dir = "{"deep/" * 30}"')
    claimed = config.claim_socket_path(settings, {"XDG_RUNTIME_DIR": str(runtime)})
    assert claimed.is_relative_to(runtime)
    assert len(os.fsencode(claimed)) <= 107
    assert claimed.parent.stat().st_mode & 0o777 == 0o700
    # Another command finds the same place, even with another environment.
    assert config.redis_url(settings) == f"unix://{claimed}"
    assert config.claim_socket_path(settings, {"XDG_RUNTIME_DIR": str(runtime)}) == claimed
    other = place.load(f'[daemon]\nstate_dir = "{"deep/" * 31}"')
    assert config.claim_socket_path(other, {"RUNTIME_DIRECTORY": str(runtime)}) != claimed


def test_socket_directory_writable_by_others_is_refused(
    place: Place, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = place.load(f'[daemon]\nstate_dir = "{"deep/" * 30}"')
    environ = {"XDG_RUNTIME_DIR": str(runtime)}
    squatted = config.claim_socket_path(settings, environ).parent
    squatted.chmod(0o777)
    monkeypatch.setattr(config.endpoint, "_LAST_RESORT", Path("/nonexistent"))
    with pytest.raises(ConfigError, match=r"^daemon\.state_dir: the path of a socket in .* 107"):
        config.claim_socket_path(settings, environ)


def _made_over(folder: Path) -> None:
    """Give the directory to another user. Without root, make it writable for all users instead."""
    if os.geteuid() == 0:
        os.chown(folder, 65534, -1)
    else:
        folder.chmod(0o777)


@pytest.mark.parametrize("case", ["directory", "link"])
def test_clients_refuse_a_server_of_another_user(place: Place, runtime: Path, case: str) -> None:
    """Clients refuse a server of another user.

    If state_dir is long, that user could create the short directory first.
    """
    settings = place.load(f'[daemon]\nstate_dir = "{"deep/" * 30}"')
    claimed = config.claim_socket_path(settings, {"XDG_RUNTIME_DIR": str(runtime)})
    claimed.parent.rmdir()
    with pytest.raises(RedisUnavailableError, match="no server has been started"):
        config.redis_url(settings)
    theirs = runtime / "theirs"
    theirs.mkdir(mode=0o700)
    if case == "link":
        claimed.parent.symlink_to(theirs)
    else:
        _made_over(theirs)
        theirs.rename(claimed.parent)
    with pytest.raises(ConfigError, match=r"the owner of state_dir; remove .*streamqd-"):
        config.redis_url(settings)


def test_clients_use_no_socket_before_the_first_start(place: Place) -> None:
    """Clients use no socket before the first start.

    Until then, any user could create the directory in /tmp.
    """
    settings = place.load(f'[daemon]\nstate_dir = "{"deep/" * 30}"')
    for prepare in (lambda: None, lambda: (place.directory / ("deep/" * 30)).mkdir(parents=True)):
        prepare()
        with pytest.raises(RedisUnavailableError, match="no server has been started"):
            config.resolve_url(settings)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user than the daemon")
def test_root_finds_the_embedded_server_of_another_user(place: Place, runtime: Path) -> None:
    """Root finds the server of another user.

    The directory may also belong to the owner of state_dir.
    """
    settings = place.load(f'[daemon]\nstate_dir = "{"deep/" * 30}"')
    claimed = config.claim_socket_path(settings, {"XDG_RUNTIME_DIR": str(runtime)})
    os.chown(claimed.parent, 65534, -1)
    os.chown(settings.daemon.state_dir, 65534, -1)
    assert config.redis_url(settings) == f"unix://{claimed}"


def test_state_dir_that_cannot_be_created_is_refused(place: Place) -> None:
    settings = place.load('[daemon]\nstate_dir = "streamq.toml/x"')
    with pytest.raises(ConfigError, match=r"cannot be created \(Not a directory\); choose another"):
        config.claim_socket_path(settings, NOTHING)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (SECRET_URL, "redis://me:***@localhost:6379/0"),
        ("redis://:p@ss/w:rd@h", "redis://:***@h"),
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("unix:///a:b@c", "unix:///a:b@c"),
        ("cannot reach redis://me:pw@h: no", "cannot reach redis://me:***@h: no"),
    ],
)
def test_mask_passwords_hides_passwords_in_urls(url: str, shown: str) -> None:
    assert config.mask_passwords(url) == shown


LONG = "u" * 300


@pytest.mark.parametrize(
    ("url", "shown", "scrubbed"),
    [
        ("redis://me:two words@h/0", "redis://me:***@h/0", "redis://me@h/0"),
        ("redis://me: lead@h", "redis://me:***@h", "redis://me@h"),
        ("redis://me:tab\tin it@h", "redis://me:***@h", "redis://me@h"),
        ("redis://my name:pw@h", "redis://my name:***@h", "redis://my name@h"),
        ("redis://me@corp:pw@h", "redis://me@corp:***@h", "redis://me@corp@h"),
        (f"redis://{LONG}:pw@h", f"redis://{LONG}:***@h", f"redis://{LONG}@h"),
        (f"redis://me:{'p' * 5000}@h", "redis://me:***@h", "redis://me@h"),
        ("redis://a/b:p@ss w/rd@h", "redis://a/b:***@h", "redis://a/b@h"),
        ("unix://me:a b@/run/r.sock", "unix://me:***@/run/r.sock", "unix://me@/run/r.sock"),
        ("redis://h/0?password=a b&db=1", "redis://h/0?password=***&db=1", "redis://h/0&db=1"),
        (SECRET_URL, "redis://me:***@localhost:6379/0", "redis://me@localhost:6379/0"),
    ],
)
def test_url_password_is_neither_shown_nor_passed_on(
    url: str, shown: str, scrubbed: str, place: Place
) -> None:
    """The check and masking find a password even if it contains a space or follows a long user."""
    assert secrets.has_password(url)
    settings = dataclasses.replace(config.Settings(), redis=config.Redis(url=url))
    assert config.as_document(settings)["redis"]["url"] == shown
    assert shown in repr(settings.redis)
    environ = {"STREAMQ_REDIS__URL": url}
    secrets.scrub(environ)
    assert environ == {"STREAMQ_REDIS__URL": scrubbed}


@pytest.mark.parametrize("url", ["redis://me@h/0", "unix:///a:b@c", "redis://h:1/0", "embedded:"])
def test_mask_passwords_keeps_a_url_without_a_password(url: str) -> None:
    assert secrets.mask_url(url) == url
    assert not secrets.has_password(url)


@pytest.mark.parametrize("name", ["me", LONG])
def test_config_file_with_a_url_password_must_be_private(place: Place, name: str) -> None:
    """The check of the file's mode recognizes the same passwords as the masking."""
    with pytest.raises(ConfigError, match=r"redis\.url"):
        place.load(f'[redis]\nurl = "redis://{name}:two words@localhost:6379/0"')


@pytest.mark.parametrize(
    "text",
    [
        *("x = " + "[" * 5000 + "]" * 5000, "x = " + "{a=" * 5000 + "1" + "}" * 5000),
        *("[daemon]\nlease_ttl" + ".a" * 900 + " = 1", "[topics" + ".a" * 5000 + "]"),
        *("[daemon]\nhandlers = " + "[" * 300 + "]" * 300, "x = " + "1" * 5000),
    ],
)
def test_deeply_nested_file_is_a_config_error(place: Place, text: str) -> None:
    """Deep nesting is a configuration error with exit code 3, and raises no RecursionError."""
    with pytest.raises(ConfigError):
        place.load(text)


@pytest.mark.parametrize("text", ["[" * 5000, "1" * 5000, "{a=" * 5000])
def test_deeply_nested_environment_variable_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        config.load(None, {}, {"STREAMQ_DAEMON__LEASE_TTL": text})


# --- declarations in code ------------------------------------------------------------------------

DECLARED = {"topic": "access", "group": "hits", "handler": "weblog:count_hit"}


def test_declared_consumers_are_added_to_the_settings(place: Place) -> None:
    class PaymentError(Exception):
        pass

    declared = {
        **DECLARED,
        "timeout": "30s",
        "max_attempts": 2,
        "backoff": Backoff("fixed", 3.0, 9.0, "none"),
        "retry_on": (OSError, "KeyError"),
        "max_rss": None,
    }
    settings = config.declare_consumers(place.load(), [declared])
    (consumer,) = settings.consumers
    assert consumer.handler == "weblog:count_hit"
    assert (consumer.timeout, consumer.max_attempts, consumer.max_rss) == (30.0, 2, 0)
    assert consumer.backoff == Backoff("fixed", 3.0, 9.0, "none")
    assert consumer.retry_on == ("OSError", "KeyError")
    assert settings.topics == {"access": config.Topic()}


def test_config_file_overrides_declared_consumers(place: Place) -> None:
    text = '[daemon]\nhandlers = ["weblog"]\n[topics.access]\npartitions = 4\n' + WORK.replace(
        'handler = "weblog:count_hit"', 'timeout = "5s"\nmax_crashes = 3'
    )
    declared = {**DECLARED, "timeout": 30, "max_crashes": 9, "max_attempts": 2}
    settings = config.declare_consumers(place.load(text), [declared])
    (consumer,) = settings.consumers
    assert consumer.handler == "weblog:count_hit"
    # The file does set max_crashes, even though to its default.
    assert (consumer.timeout, consumer.max_crashes, consumer.max_attempts) == (5.0, 3, 2)
    assert settings.topics["access"].partitions == 4


def test_duplicate_consumer_declaration_counts_once(place: Place) -> None:
    settings = config.declare_consumers(place.load(), [DECLARED, dict(DECLARED)])
    assert len(settings.consumers) == 1


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (
            [DECLARED, {**DECLARED, "handler": "weblog:other"}],
            "@handler(access/hits): weblog:count_hit and weblog:other declare the same",
        ),
        (
            [{**DECLARED, "max_attemps": 3}],
            "@handler(access/hits).max_attemps: unknown setting; did you mean",
        ),
        ([{**DECLARED, "timeout": "soon"}], '@handler(access/hits).timeout: "soon" is not a dur'),
        (
            [{**DECLARED, "timeout": 9, "hard_timeout": 8}],
            '@handler(access/hits).hard_timeout: "8s" is not longer than timeout ("9s")',
        ),
        ([{**DECLARED, "topic": "a b"}], '@handler(a b/hits).topic: "a b" is not valid'),
        (
            [{**DECLARED, "handler": "weblog:make.<locals>.count_hit"}],
            '@handler(access/hits).handler: "weblog:make.<locals>.count_hit" is not valid',
        ),
    ],
)
def test_invalid_consumer_declarations_are_problems(
    place: Place, declared: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        config.declare_consumers(place.load(), declared)
    (found,) = raised.value.problems
    assert said in found


def test_merged_consumer_settings_are_checked_together(place: Place) -> None:
    settings = place.load(WORK + 'hard_timeout = "5s"')
    with pytest.raises(ConfigError, match=r'consumers\[0\]\.hard_timeout: "5s" is not longer'):
        config.declare_consumers(settings, [{**DECLARED, "timeout": "30s"}])


def test_consumer_without_a_declaration_is_a_problem(place: Place) -> None:
    text = '[daemon]\nhandlers = ["weblog"]\n' + WORK.replace('"weblog:count_hit"', '""')
    with pytest.raises(ConfigError, match="is missing, and no module declares one for access/hits"):
        config.declare_consumers(place.load(text), [{**DECLARED, "group": "other"}])


# --- warnings ------------------------------------------------------------------------------------


def test_default_configuration_causes_no_warning(place: Place) -> None:
    assert config.warnings(place.load(WORK)) == []


@pytest.mark.parametrize(
    "more",
    [
        "breaker = { failures = 7 }",
        'breaker = { failures = 3 }\nretry_max_age = "1h"',
        "breaker = { failures = 3 }\nmax_attempts = 0",
    ],
)
def test_safe_circuit_breaker_causes_no_warning(place: Place, more: str) -> None:
    assert config.warnings(place.load(WORK + more)) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (WORK + 'hard_timeout = "1m"', "a message of access/hits may run for 1m, but a stop"),
        (WORK + 'timeout = "31s"', "but a stop waits only 30s"),
        ('[daemon]\nlease_ttl = "1s"', "redis.connect_timeout: it is longer than daemon.lease_ttl"),
        (
            '[http]\nbind = "0.0.0.0:9464"\nallow_public = true',
            "http.bind: any client that reaches this address",
        ),
        (WORK + "breaker = { failures = 6 }", "breaker.failures: a message of access/hits that"),
    ],
)
def test_risky_settings_cause_warnings(place: Place, text: str, said: str) -> None:
    (found,) = config.warnings(place.load(text))
    assert said in found


# --- the settings of a web framework --------------------------------------------------------------


def test_environment_overrides_given_settings_in_a_copy(tmp_path: Path) -> None:
    given = {"redis": {"url": "redis://127.0.0.1:1/0"}, "topics": {"orders": {"partitions": 3}}}

    plain = config.load_given(given, "STREAMQD", environ={})
    over = config.load_given(
        given, "STREAMQD", environ={"STREAMQ_REDIS__URL": "redis://127.0.0.1:2/0"}
    )

    assert (plain.redis.url, plain.topics["orders"].partitions) == ("redis://127.0.0.1:1/0", 3)
    assert over.redis.url == "redis://127.0.0.1:2/0"
    assert given["redis"] == {"url": "redis://127.0.0.1:1/0"}


def test_given_path_is_loaded_and_none_is_the_default_file(tmp_path: Path) -> None:
    file = tmp_path / "shop.toml"
    file.write_text('[redis]\nurl = "redis://127.0.0.1:1/0"\n')

    for given, environ in ((file, {}), (str(file), {}), (None, {"STREAMQ_CONFIG": str(file)})):
        assert (
            config.load_given(given, "STREAMQD", environ=environ).redis.url
            == "redis://127.0.0.1:1/0"
        )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (5, "STREAMQD must be a path or a dictionary of sections, not int"),
        ({"redis": {"urll": ""}}, "redis.urll"),
        ({"redis": 5}, "redis"),
        ("/no/such/file.toml", "file not found"),
    ],
)
def test_given_value_of_a_wrong_type_is_refused(given: object, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        config.load_given(given, "STREAMQD", environ={})


@pytest.mark.parametrize(
    "url",
    [
        "javascript:alert('{trace_id}')",
        "//tempo.example/trace/{trace_id}",
        "https://{trace_id}.example/",
        "https://anna@tempo.example/{trace_id}",
        "https://tempo.example/trace",
        "https://tempo.example/{trace_id}/{span_id}",
        "https://tempo.example/{trace_id}/{trace_id}",
        "https://tempo.example/ {trace_id}",
        'https://tempo.example/"{trace_id}',
        "ftp://tempo.example/{trace_id}",
    ],
)
def test_trace_url_must_be_an_http_template(place: Place, url: str) -> None:
    found = place.problem(overrides={"console.trace_url": url})
    assert found.startswith("console.trace_url")
    assert 'write a URL such as "https://tempo.example/trace/{trace_id}"' in found


def test_console_archive_path_is_absolute(place: Place) -> None:
    assert "write an absolute path" in place.problem('[console]\narchive = "archive"\n')
    text = '[console]\narchive = "s3://b/a"\ntrace_url = "http://[::1]:3200/t/{trace_id}?a=b#c"\n'
    assert place.load(text).console.archive == "s3://b/a"
