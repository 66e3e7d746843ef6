"""The settings of a topic: values in the file override the registered values."""

from __future__ import annotations

import json
from pathlib import Path

from streamqd import config
from streamqd.config import Retention, Topic


def load_topic(folder: Path, text: str) -> Topic:
    file = folder / "streamq.toml"
    file.write_text(text)
    return config.load(file, {}, {}).topics["access"]


def test_registered_settings_restore_the_topic(tmp_path: Path) -> None:
    stated = load_topic(
        tmp_path,
        "[topics.access]\n"
        'retention = { max_age = "1h", max_bytes = "1MiB", ack_policy = "delete" }',
    )
    stored = config.registered_settings(stated)
    assert stored["archive"] == "off"
    assert stored["retention"] == {"max_age": 3600.0, "max_bytes": 1 << 20, "ack_policy": "delete"}
    assert "partitions" not in stored
    assert config.effective(Topic(), json.loads(json.dumps(stored))) == stated


def test_file_overrides_registered_settings_one_by_one(tmp_path: Path) -> None:
    stored = {"archive": "required", "retention": {"max_age": 60.0, "max_length": 7}}
    stated = load_topic(tmp_path, '[topics.access]\nretention = { max_age = "none" }')
    found = config.effective(stated, stored)
    assert found.retention == Retention(max_age=None, max_length=7)
    assert found.archive == "required"
    stated = load_topic(tmp_path, '[topics.access]\narchive = "off"')
    assert config.effective(stated, stored).archive == "off"


def test_settings_of_code_override_registered_settings() -> None:
    built = Topic(retention=Retention(max_length=100))
    found = config.effective(built, {"retention": {"max_age": 60, "max_length": 5}})
    assert found.retention == Retention(max_age=60.0, max_length=100)


def test_unreadable_setting_is_skipped() -> None:
    stored = {
        "archive": "sometimes",
        "partitions": 9,
        "later": 1,
        "retention": {"max_age": -1, "max_length": "many", "max_bytes": None, "shrink_every": "1h"},
    }
    assert config.effective(Topic(), stored) == Topic(retention=Retention(shrink_every=3600.0))
    assert config.effective(Topic(), {"retention": 5}) == Topic()


def test_retention_settings_trim_or_drop() -> None:
    assert not Retention().bounded
    assert Retention(ack_policy="delete").bounded
    assert Retention(max_length=0).bounded
    assert not Retention(drop_unacked_above=5).bounded
    assert Retention(drop_unacked_above=5).drops
    assert not Retention(max_age=1).drops
