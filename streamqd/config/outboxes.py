"""The name of an outbox table, which the configuration, the sender and the relay all check."""

from __future__ import annotations

import re

from streamqd.config.setting import Shape

TABLE = "streamqd_outbox"
TABLE_CHARS_MAX = 48  # with `_dead`, a name of PostgreSQL (63 bytes) and of MySQL (64 characters)
TABLE_NAME = Shape(
    re.compile(
        rf"(?=.{{1,{TABLE_CHARS_MAX}}}\Z)(?:[A-Za-z_][A-Za-z0-9_]*\.)?[A-Za-z_][A-Za-z0-9_]*",
        re.ASCII,
    ),
    f"use 1 to {TABLE_CHARS_MAX} of A-Z a-z 0-9 _ with no digit first, and at most one dot after a"
    " schema",
)
