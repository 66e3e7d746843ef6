"""Real lines of an access log, parsed in two groups, for the daemon and the bare loop.

Workers import this module, so it imports nothing from the other benchmarks.
"""

from __future__ import annotations

import contextlib
import gzip
from collections import Counter
from pathlib import Path
from typing import Any

from streamqd import Dead, Message
from streamqd.examples import weblog

LOG = Path(weblog.__file__).with_name("data") / "apache_access.log.gz"

_paths: Counter[str] = Counter()
_agents: Counter[str] = Counter()


def hits(message: Message) -> None:
    """Count a request by its path. The truncated line becomes a dead letter."""
    _paths[weblog.parse(message.text()).path] += 1


def agents(message: Message) -> None:
    """Count a request by its user agent."""
    _agents[weblog.parse(message.text()).agent] += 1


def bare_hits(fields: Any) -> None:
    """Count the fields of an entry in the same way as `hits`, but drop the truncated line."""
    with contextlib.suppress(Dead):
        _paths[weblog.parse(_text(fields)).path] += 1


def bare_agents(fields: Any) -> None:
    """Count the fields of an entry in the same way as `agents`, but drop the truncated line."""
    with contextlib.suppress(Dead):
        _agents[weblog.parse(_text(fields)).agent] += 1


def lines() -> list[bytes]:
    """Return all lines of the log."""
    with gzip.open(LOG) as log:
        return [line.rstrip(b"\n") for line in log]


def _text(fields: Any) -> str:
    payload: bytes = fields[b"payload"] if isinstance(fields, dict) else fields[1]
    return payload.decode()
