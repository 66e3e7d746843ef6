"""The modules on the page about Sentry and OpenTelemetry, run as written, report as promised."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.pages.reader import fences

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "sentry-and-opentelemetry.md"
RUN = """
from pathlib import Path
from streamqd.testing import run
import {module}
{function}
ended = run({module}.bill, b"x", headers={headers!r}, state_dir=Path("."))
print("VERDICT", ended.verdict)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for fence in fences(PAGE):
        (tmp_path / fence.file).write_text(fence.text)
    return tmp_path


def run(folder: Path, text: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=folder,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def sentry() -> Iterator[tuple[str, list[bytes]]]:
    """Run a server for events. Yields its address and the received events."""
    got: list[bytes] = []

    class Taker(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Taker)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://key@127.0.0.1:{server.server_port}/1", got
    server.shutdown()
    thread.join()
    server.server_close()


def test_sentry_gets_the_exception_of_a_handler(
    folder: Path, sentry: tuple[str, list[bytes]]
) -> None:
    """U15"""
    address, got = sentry
    fails = "def broken(msg): raise ValueError('the card was declined')\n"
    fails += "broken.__module__ = 'alerts'  # whose on_start is run\n"
    fails += "alerts.bill = alerts.reported(broken)"
    said = run(folder, RUN.format(module="alerts", function=fails, headers={}), SENTRY_DSN=address)
    assert "VERDICT retry" in said
    told = b"".join(gzip.decompress(each) if each[:2] == b"\x1f\x8b" else each for each in got)
    assert b"the card was declined" in told
    assert b"streamqd.topic" in told


def test_a_trace_continues_that_of_the_producer(folder: Path) -> None:
    """U15"""
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    said = run(folder, RUN.format(module="traced", function="", headers={"traceparent": parent}))
    assert "VERDICT ack" in said
    span = json.loads(said[said.index("{") : said.rindex("}") + 1])
    assert span["name"] == "orders process"
    assert span["links"][0]["context"]["trace_id"] == "0x" + "a" * 32
