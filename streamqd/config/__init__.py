"""Read, check and describe the configuration.

`load` returns Settings, or raises one ConfigError that contains every problem. Other packages
receive only the sections that they need, and do not read the environment themselves.
"""

from __future__ import annotations

from streamqd.config.archive_store import ArchiveStore
from streamqd.config.checks import find_useless, warnings
from streamqd.config.consumers import Consumer
from streamqd.config.effective import effective, registered_settings
from streamqd.config.endpoint import claim_socket_path, redis_url, resolve_url
from streamqd.config.exposure import (
    find_world_writable,
    is_loopback,
    is_public,
    root_warnings,
    token_path,
)
from streamqd.config.loader import declare_consumers, find, load, load_given
from streamqd.config.outboxes import OutboxSettings
from streamqd.config.pipelines import Pipeline
from streamqd.config.reference import (
    SettingReference,
    as_document,
    json_schema,
    reference,
    reference_toml,
)
from streamqd.config.schedules import Schedule
from streamqd.config.schema import Console, Daemon, Http, KeyPrefixes, Log, Redis, Settings
from streamqd.config.secrets import mask_passwords, scrub
from streamqd.config.topics import Retention, Topic

__all__ = [
    "ArchiveStore",
    "Console",
    "Consumer",
    "Daemon",
    "Http",
    "KeyPrefixes",
    "Log",
    "OutboxSettings",
    "Pipeline",
    "Redis",
    "Retention",
    "Schedule",
    "SettingReference",
    "Settings",
    "Topic",
    "as_document",
    "claim_socket_path",
    "declare_consumers",
    "effective",
    "find",
    "find_useless",
    "find_world_writable",
    "is_loopback",
    "is_public",
    "json_schema",
    "load",
    "load_given",
    "mask_passwords",
    "redis_url",
    "reference",
    "reference_toml",
    "registered_settings",
    "resolve_url",
    "root_warnings",
    "scrub",
    "token_path",
    "warnings",
]
