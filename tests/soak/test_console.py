"""The console of a full fleet: ten topics with 1,000,000 messages and 200,000 dead letters.

Opens each view in Chromium: it must appear within a second, no command may take Redis 50 ms, and
50 open pages may not cost Redis more than one. Skipped unless LETTERS sets the number of dead
letters. There are five messages for each: `LETTERS=200_000 pytest -s tests/soak/test_console.py`.
RESULT names the result file.
"""

from __future__ import annotations

import datetime as dt
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support import optional
from tests.support.console import NO_BROWSER
from tests.support.machine import machine
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.timeout(1_800),
    pytest.mark.skipif("LETTERS" not in os.environ, reason="a soak test: LETTERS=200_000"),
    optional.need("starlette", "playwright"),
    NO_BROWSER,
]

from tests.console.conftest import browser  # noqa: E402, F401
from tests.support import full_fleet  # noqa: E402
from tests.support.full_fleet import COMMANDS_MAX, PAINT_MS  # noqa: E402

ROOT = Path(__file__).parents[2]
LETTERS = int(os.environ.get("LETTERS", "0"))
MESSAGES = 5 * LETTERS
SEED = int(os.environ.get("SEED", "1"))
MEMORY_MIB = 150


def test_console_of_a_full_fleet_is_fast(new_server: Any, tmp_path: Path, browser: Any) -> None:  # noqa: F811
    server = new_server(aof=False)
    with suppress(PermissionError):
        server.come_first()
    with full_fleet.full_daemon(tmp_path, server.url) as daemon:
        daemon.send(["dead"])
        wait_until(daemon.letters, timeout=30, what="the model of all letters is there")
        daemon.pause()
        full_fleet.fill(daemon, MESSAGES, LETTERS, SEED)
        full_fleet.watch_slow(daemon)

        found = full_fleet.measure(daemon, browser)

        write_result(found)
    views = found["views"]
    assert {name: each for name, each in views.items() if each["status"] != 200} == {}
    late = {name: each for name, each in views.items() if each["first_paint_ms"] >= PAINT_MS}
    assert late == {}
    assert {name: each for name, each in views.items() if each["commands"] > COMMANDS_MAX} == {}
    assert found["slow_commands"] == []
    assert found["cost_of_50_pages"] < 1.35
    assert found["rss_mib"] < MEMORY_MIB


def write_result(figures: dict[str, Any]) -> None:
    """Write the figures to the file that RESULT names."""
    document = {
        "command": f"make soak NAME=console LETTERS={LETTERS} SEED={SEED}",
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": machine(),
        "topics": len(full_fleet.TOPICS),
        "partitions": full_fleet.PARTITIONS,
        "messages": MESSAGES,
        "dead_letters": LETTERS,
        **figures,
    }
    if "RESULT" in os.environ:
        path = ROOT / os.environ["RESULT"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")
