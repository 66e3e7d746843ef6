"""Ten thousand workers start and exit under a storm of signals, and leave nothing behind.

Skipped unless COUNT sets their number: `make soak NAME=hygiene`. RESULT names the result file.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import hygiene
from tests.support.daemon import Daemon
from tests.support.machine import machine
from tests.support.servers import ProcessServer

pytestmark = [
    pytest.mark.timeout(4 * 3600),
    pytest.mark.skipif(
        "COUNT" not in os.environ, reason="a soak test: `make soak NAME=hygiene` runs it"
    ),
]

ROOT = Path(__file__).parents[2]
COUNT = int(os.environ.get("COUNT") or "10000")
SEED = int(os.environ.get("SEED") or "1")
FIGURES = ("supervisor_fds", "supervisor_rss", "housekeeper_fds", "housekeeper_rss")


def test_recycles_leak_nothing(
    new_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"\nCOUNT={COUNT} SEED={SEED}, with {', '.join(hygiene.clients())}", flush=True)
    server: ProcessServer = new_server(aof=False)
    with hygiene.echo_peer(tmp_path / "peer") as peer:
        monkeypatch.setenv("PEER", peer)
        daemon = Daemon(tmp_path, server.url, **hygiene.daemon_options())
        with daemon:
            storm = hygiene.Storm(daemon, SEED)
            began = time.monotonic()
            storm.run(COUNT, every=1.0)
            seconds = time.monotonic() - began
            storm.judge()
            recycles = storm.wait_recycles(COUNT)
            assert daemon.stop() == 0
    write_result(storm, recycles, seconds, f"{server.product} {server.facts.version}")


def write_result(storm: hygiene.Storm, recycles: int, seconds: float, server: str) -> None:
    """Print the figures, and write them to the file that RESULT names."""
    document = {
        "what": "every worker handles one message and is replaced, under a storm of signals; each"
        " message ran once, no zombie, no orphan, no process left at the end",
        "command": f"make soak NAME=hygiene COUNT={COUNT} SEED={SEED}",
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": machine(),
        "server": server,
        "seed": SEED,
        "clients": hygiene.clients(),
        "partitions": hygiene.PARTITIONS,
        "recycles": recycles,
        "signals": storm.signals,
        "seconds": round(seconds),
        "recycles_per_second": round(recycles / seconds, 1),
        "samples": len(storm.samples),
        "median_of_first_and_last_sixth": {
            name: list(storm.sixth_medians(name)) for name in FIGURES
        },
    }
    text = json.dumps(document, indent=1) + "\n"
    print(text, flush=True)
    if "RESULT" in os.environ:
        path = ROOT / os.environ["RESULT"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
