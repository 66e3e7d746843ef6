"""`event_loop = "uvloop"` keeps the same promises, and reports one error if uvloop is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from streamqd import extras
from streamqd.errors import HandlerLoadError
from streamqd.worker.eventloop import new_loop
from tests.support.daemon import Daemon
from tests.support.optional import need

NewDaemon = Callable[..., Daemon]

CODE = """
import asyncio, time
from pathlib import Path
from streamqd import Dead, Message

async def obey(message: Message) -> None:
    word = message.text()
    Path("loop").write_text(type(asyncio.get_running_loop()).__module__)
    if word == "block":
        time.sleep(3)
    if word == "long":
        await asyncio.sleep(60)
    if word == "dead":
        raise Dead("no")
    await asyncio.sleep(0.01)
"""
# Runs the command line as if uvloop were not installed.
WITHOUT = 'import sys; sys.modules["uvloop"] = None; from streamqd.cli import cli; cli()'
UVLOOP: dict[str, Any] = {"event_loop": "uvloop"}


def test_missing_uvloop_error_is_one_sentence(new_daemon: NewDaemon) -> None:
    """`check` reports the missing package in one sentence, before any message runs."""
    daemon = new_daemon(code=CODE, daemon=UVLOOP)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, "--config", str(daemon.config_path), "check"],
        cwd=daemon.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    sentence = f'daemon.event_loop: "uvloop" is not installed; {extras.hint("uvloop")}'
    assert sentence in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 1


def test_unimportable_event_loop_is_a_handler_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An event loop that cannot be imported is a handler error.

    This happens, for example, if uvloop is removed while the daemon runs.
    """
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with pytest.raises(HandlerLoadError, match=r'daemon\.event_loop "uvloop" cannot be imported'):
        new_loop("uvloop")


@need("uvloop")
@pytest.mark.parametrize("concurrency", [1, 50])
def test_messages_run_on_uvloop(new_daemon: NewDaemon, concurrency: int) -> None:
    """Outcomes, time limits, dead letters and reports of blocked loops are as with asyncio."""
    consumer = {"concurrency": concurrency, "timeout": "5s", "max_attempts": 1}
    with new_daemon(code=CODE, daemon=UVLOOP, consumer=consumer) as daemon:
        daemon.send(["dead", "long", *["quick"] * 100])
        daemon.wait_settled()
        assert (daemon.folder / "loop").read_text() == "uvloop"
        assert len(daemon.letters()) == 2
        daemon.send(["block"])
        event = daemon.wait_event("loop.blocked")
        assert event["function"] == "obey"
        daemon.wait_settled()
        assert daemon.stop() == 0
