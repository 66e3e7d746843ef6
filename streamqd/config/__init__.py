"""Reading, checking and describing the configuration.

`load` gives Settings or a ConfigError that lists every problem at once. Later modules take the
section that they need, never the whole, and never read the environment themselves.
"""

from __future__ import annotations

from streamqd.config.checks import warnings
from streamqd.config.consumers import Consumer, Retention, Topic
from streamqd.config.effective import effective, registered
from streamqd.config.endpoint import claim_socket_path, masked, redis_url, resolved
from streamqd.config.loader import declare_consumers, load
from streamqd.config.reference import json_schema, reference_toml, shown
from streamqd.config.schema import Daemon, Http, Keys, Log, Redis, Settings

__all__ = [
    "Consumer",
    "Daemon",
    "Http",
    "Keys",
    "Log",
    "Redis",
    "Retention",
    "Settings",
    "Topic",
    "claim_socket_path",
    "declare_consumers",
    "effective",
    "json_schema",
    "load",
    "masked",
    "redis_url",
    "reference_toml",
    "registered",
    "resolved",
    "shown",
    "warnings",
]
