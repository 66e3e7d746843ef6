"""Each example of a producer runs, and is the same code as on the page."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

from streamqd.examples import produce_async, produce_buffered
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from tests.integration.test_producer_buffered import payloads

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "produce-messages.md"


@pytest.mark.parametrize("shown", [produce_buffered.send, produce_async.order])
def test_documentation_shows_the_code_of_the_example(shown: FunctionType) -> None:
    assert f"```python\n{inspect.getsource(shown)}```" in PAGE.read_text()


def run(module: str, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"streamqd.examples.{module}", *arguments]
    return subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=60, check=False
    )


def test_buffered_example_sends_all_readings(server, link: Connection, keys: Keys) -> None:
    lines = "".join(f"sensor-{n % 3} {n}\n" for n in range(500))
    ended = run("produce_buffered", server.url, given=lines)

    assert (ended.stdout, ended.stderr) == ("500 written, 0 not\n", "")
    assert payloads(link, keys, "readings") == [b"%.1f" % n for n in range(500)]


def test_producer_example_reports_a_missing_redis(tmp_path: Path) -> None:
    ended = run("produce_buffered", f"unix://{tmp_path}/none.sock", given="sensor-1 1\n")

    assert ended.stdout == "0 written, 1 not\n"


def test_async_example_sends_orders_from_many_tasks(server, link: Connection, keys: Keys) -> None:
    first = run("produce_async", server.url, "200")
    again = run("produce_async", server.url, "200")

    assert first.stderr == again.stderr == ""
    assert first.stdout == again.stdout
    assert len(set(first.stdout.split())) == len(payloads(link, keys, "orders")) == 200
