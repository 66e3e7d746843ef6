"""Real lines of an access log, parsed in two groups: as the daemon has it, and as the bare loop.

Workers import this module, so it needs nothing of the benchmarks.
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
    """Count a request by its path; the line that is cut off becomes a dead letter."""
    _paths[weblog.parse(message.text()).path] += 1


def agents(message: Message) -> None:
    """Count a request by the program that sent it."""
    _agents[weblog.parse(message.text()).agent] += 1


def bare_hits(fields: Any) -> None:
    """The same of the fields of an entry; nobody keeps the line that is cut off."""
    with contextlib.suppress(Dead):
        _paths[weblog.parse(_text(fields)).path] += 1


def bare_agents(fields: Any) -> None:
    """As `bare_hits`."""
    with contextlib.suppress(Dead):
        _agents[weblog.parse(_text(fields)).agent] += 1


def lines() -> list[bytes]:
    """All lines of the log."""
    with gzip.open(LOG) as log:
        return [line.rstrip(b"\n") for line in log]


def _text(fields: Any) -> str:
    payload: bytes = fields[b"payload"] if isinstance(fields, dict) else fields[1]
    return payload.decode()
