"""`make run` and `make serve`, started as processes, do the daemon's main job on real input."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from tests.support.waiting import wait_until

pytestmark = [pytest.mark.timeout(180)]

COMMAND = [sys.executable, "-m", "streamqd.examples.demo"]


def test_make_run_handles_every_line_and_exits(tmp_path: Path):
    done = subprocess.run(
        [*COMMAND, "--dir", str(tmp_path / "demo")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
    )

    assert done.returncode == 0, done.stdout
    words = [line.split() for line in done.stdout.splitlines()]
    assert ["hits", "9,999", "1"] in words
    assert ["agents", "9,999", "1"] in words
    assert "✗" not in done.stdout
    assert done.stdout.count("✓") == 6
    assert done.stdout.count("not a line of the combined log format") == 2
    # The largest count in the log, computed with a text tool instead of streamqd.
    assert ["796", "200", "/favicon.ico"] in words


def test_make_serve_leaves_no_process_after_an_interrupt(tmp_path: Path):
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*COMMAND, "--dir", str(tmp_path / "demo"), "--serve"],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(
            lambda: "The daemon keeps running" in output.read_text() or process.poll() is not None,
            timeout=150,
            what="the demonstration serves",
        )
        assert process.poll() is None, output.read_text()
        if importlib.util.find_spec("starlette"):  # part of the packages that `make serve` installs
            first = output.read_text().splitlines()[0]
            link = re.fullmatch(r"console: (http://127\.0\.0\.1:\d+/\?token=\S+)", first)
            assert link, first
            with urlopen(link[1].partition("?")[0] + "livez", timeout=30) as answer:
                assert answer.read() == b"ok\n"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2 + 8  # supervisor, server or housekeeper, and the workers

        process.send_signal(signal.SIGINT)

        assert process.wait(60) == 0, output.read_text()
        _, alive = psutil.wait_procs(family, timeout=5)
        assert alive == []
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
