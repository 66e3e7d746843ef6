"""The reference file, the schema and `config show` agree with the code."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import tomli

from streamqd import config
from streamqd.config.schema import NAMED_SECTIONS, SECTIONS
from streamqd.config.setting import Kind, section_settings
from streamqd.model import Backoff

REFERENCE = Path(__file__).parents[2] / "etc/streamq.toml"
REGENERATE = (
    "python -c 'from streamqd import config; print(config.reference_toml(), end=str())'"
    " > etc/streamq.toml"
)
TABLES = [
    *(*SECTIONS.values(), *NAMED_SECTIONS.values()),
    *(config.Consumer, config.Schedule, config.Retention, Backoff),
]


def load(directory: Path, text: str) -> config.Settings:
    file = directory / "streamq.toml"
    file.write_text(text)
    return config.load(file, {}, {})


def test_reference_file_is_current() -> None:
    assert REFERENCE.read_text() == config.reference_toml(), f"run: {REGENERATE}"


def test_reference_file_loads_as_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, config.reference_toml()) == load(tmp_path, "")


def test_reference_states_the_defaults(
    tmp_path: Path,
) -> None:
    text = re.sub(r"(?m)^#(?! |$)", "", config.reference_toml())
    # A consumer without a handler is refused, so this line changes. All others stay as they are.
    settings = load(tmp_path, text.replace('handler = ""', 'handler = "weblog:count_hit"'))
    plain = load(tmp_path, "")
    bare = dataclasses.replace(
        settings, topics={}, pipelines={}, consumers=(), schedules=(), outboxes=()
    )
    assert bare == plain
    assert settings.schedules == (config.Schedule("nightly", "access", cron="0 3 * * *"),)
    assert settings.outboxes == (config.OutboxSettings("shop", "${DATABASE_URL}"),)
    assert settings.pipelines == {"access": config.Pipeline()}
    assert settings.topics == {"access": config.Topic()}
    assert settings.topics["access"].explicit == set(section_settings(config.Topic))
    expected = config.Consumer(topic="access", group="hits", handler="weblog:count_hit")
    assert settings.consumers == (expected,)
    assert settings.consumers[0].explicit == set(section_settings(config.Consumer))


def test_reference_describes_every_setting_once() -> None:
    text = config.reference_toml()
    for section in (*SECTIONS.values(), *NAMED_SECTIONS.values(), config.Consumer, config.Schedule):
        for name, setting in section_settings(section).items():
            assert re.search(rf"(?m)^#{name}(\.\w+)? = ", text), name
            flat = re.sub(r"\s*\n#\s*", " ", text)
            assert setting.doc in flat, name


def test_reference_lines_have_at_most_100_columns() -> None:
    assert max(map(len, config.reference_toml().splitlines())) <= 100


@pytest.mark.parametrize("section", TABLES, ids=lambda section: section.__name__)
def test_every_setting_has_a_description(section: type) -> None:
    described = section_settings(section)
    fields = {field.name for field in dataclasses.fields(section)} - {"explicit", "place"}
    assert set(described) == fields
    for name, setting in described.items():
        assert re.search(r"[.!]$", setting.doc), name
        assert (setting.kind is Kind.TABLE) == (setting.table is not None), name
        assert setting.kind is not Kind.TEXTS or setting.shape is not None, name


# --- config show ---------------------------------------------------------------------------------


def test_printed_configuration_loads_as_equal_settings(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        """
        [redis]
        url = "redis://localhost:1/2"
        [daemon]
        lease_ttl = "1m30s"
        [topics.access]
        retention = { max_age = "1h" }
        [[consumers]]
        topic = "access"
        group = "hits"
        handler = "weblog:count_hit"
        hard_timeout = 2.5
        """,
    )
    shown = config.as_document(settings)
    assert shown["daemon"]["lease_ttl"] == "1m30s"
    retention = shown["topics"]["access"]["retention"]
    assert (retention["max_age"], retention["max_length"]) == ("1h", "none")
    (tmp_path / "shown.toml").write_text(to_toml(json.loads(json.dumps(shown))))
    again = config.load(tmp_path / "shown.toml", {}, {})
    assert dataclasses.replace(again, source=settings.source) == settings


def to_toml(document: dict[str, object]) -> str:
    """Return a document as inline TOML. Strings, numbers and lists in JSON are also valid TOML."""

    def value(item: object) -> str:
        if isinstance(item, dict):
            return "{" + ", ".join(f"{key} = {value(each)}" for key, each in item.items()) + "}"
        if isinstance(item, list):
            return "[" + ", ".join(value(each) for each in item) + "]"
        return json.dumps(item)

    text = "\n".join(f"{key} = {value(item)}" for key, item in document.items())
    assert tomli.loads(text) == document
    return text


def test_printed_configuration_has_no_password(tmp_path: Path) -> None:
    url = "redis://me:s3cret@localhost:1/2"
    settings = config.load(None, {}, {"STREAMQ_REDIS__URL": url})
    text = json.dumps(config.as_document(settings))
    assert "s3cret" not in text
    assert "redis://me:***@localhost:1/2" in text


# --- the schema ----------------------------------------------------------------------------------


def test_schema_contains_exactly_the_settings() -> None:
    schema = config.json_schema()
    assert schema["additionalProperties"] is False
    for name, section in SECTIONS.items():
        table = schema["properties"][name]
        assert table["additionalProperties"] is False
        assert set(table["properties"]) == set(section_settings(section))
    consumer = schema["properties"]["consumers"]["items"]
    assert set(consumer["properties"]) == set(section_settings(config.Consumer))
    assert consumer["required"] == ["topic", "group"]
    topic = schema["properties"]["topics"]["additionalProperties"]
    bounds = topic["properties"]["retention"]["properties"]
    assert set(bounds) == set(section_settings(config.Retention))


def test_schema_has_the_bounds_and_defaults_of_the_settings() -> None:
    daemon = config.json_schema()["properties"]["daemon"]["properties"]
    assert daemon["weight"]["default"] == 1
    assert (daemon["weight"]["minimum"], daemon["weight"]["maximum"]) == (1, 1000)
    assert daemon["lease_ttl"]["default"] == "15s"
    number, text = daemon["lease_ttl"]["anyOf"]
    assert (number["minimum"], number["maximum"]) == (1, 3600)
    assert re.fullmatch(text["pattern"], "1m30s")
    assert not re.fullmatch(text["pattern"], "soon")
    assert "default" not in daemon["instance"]


def test_schema_accepts_none_where_the_loader_does() -> None:
    consumer = config.json_schema()["properties"]["consumers"]["items"]["properties"]
    assert {"const": "none"} in consumer["timeout"]["anyOf"]
    assert {"const": "none"} not in consumer["max_age"]["anyOf"]
    assert consumer["start"]["enum"] == ["earliest", "latest"]


def test_schema_is_valid_json() -> None:
    assert json.loads(json.dumps(config.json_schema())) == config.json_schema()
