"""If a coroutine blocks its worker's event loop, the log, `why` and `doctor` name the code.

The handler records when it blocks the loop. The report has no time limit, but it must come while
the loop is still blocked.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.test_operator_questions import document, run_command, wait_cause
from tests.support.daemon import GROUP, TOPIC, Daemon

NewDaemon = Callable[..., Daemon]

pytestmark = pytest.mark.slow

COMMON = """
import asyncio, re, threading, time
from pathlib import Path
from streamqd import Message

async def obey(message: Message) -> None:
    word = message.text()
    if word == "wait":
        await asyncio.sleep(1)
    elif word == "away":
        # The thread starts inside `obey`. It waits until the loop has left `obey`.
        turned = threading.Event()
        asyncio.get_running_loop().call_soon(turned.set)
        await asyncio.to_thread(hold, turned)
    else:
        Path("blocks").write_text(f"{time.time()}")
        block()

def hold(turned: threading.Event) -> None:
    turned.wait()
    Path("blocks").write_text(f"{time.time()}")
    re.match(r"(a|aa)+$", "a" * 60 + "b")
"""
SLEEPS = "\ndef block() -> None:\n    time.sleep(3)\n"
# The regular expression would take centuries, and it holds the interpreter's lock.
FOR_EVER = '\ndef block() -> None:\n    re.match(r"(a|aa)+$", "a" * 200 + "b")\n'
SEVERAL: dict[str, Any] = {"concurrency": 50, "order": "none"}


def line_number(daemon: Daemon, text: str) -> int:
    (line,) = [
        number
        for number, each in enumerate(daemon.module_path.read_text().splitlines(), 1)
        if text in each
    ]
    return line


def block_seconds(folder: Path, event: dict[str, Any]) -> float:
    """Return the seconds from the moment when the loop was blocked until the event."""
    written = datetime.fromisoformat(event["ts"]).timestamp()
    return written - float((folder / "blocks").read_text())


@pytest.mark.parametrize("options", [SEVERAL, {}], ids=["several", "one"])
def test_blocked_loop_is_reported_with_its_code(
    new_daemon: NewDaemon, options: dict[str, Any]
) -> None:
    """The report names the code, whether one of 50 coroutines blocks for 3 s or the only one."""
    with new_daemon(code=COMMON + SLEEPS, consumer=options) as daemon:
        uids = daemon.send(["block"] + ["wait"] * (49 if options else 0))
        event = daemon.wait_event("loop.blocked")
        assert (event["file"], event["function"]) == (str(daemon.module_path), "block")
        assert event["line"] == line_number(daemon, "time.sleep(3)")
        assert (event["topic"], event["partition"], event["group"]) == (TOPIC, 0, GROUP)
        assert event["child"] in daemon.pids().values()
        assert event["running"] == len(event["messages"]) or event["running"] > 8
        assert set(event["messages"]) <= set(uids)
        assert "in obey" in event["traceback"]
        assert 1 <= event["seconds"] < 3
        print(f"named {block_seconds(daemon.folder, event):.2f} s after the block began")
        resumed = daemon.wait_event("loop.resumed")
        assert resumed["seconds"] >= 2.9
        daemon.wait_settled()
        assert len(daemon.events("loop.blocked")) <= 2, "after 1, 2 and 4 seconds, and it took 3"


def test_loop_blocked_in_c_code_is_reported_less_and_less(
    new_daemon: NewDaemon,
) -> None:
    """A block in C code is logged at growing intervals.

    The C code holds the interpreter's lock, so no thread of the worker can report the line.
    """
    with new_daemon(code=COMMON + FOR_EVER, consumer=SEVERAL, http="127.0.0.1:0") as daemon:
        daemon.send(["block"])
        daemon.wait_for(lambda: len(daemon.events("loop.blocked")) == 3, what="three reports")
        first, second, third = daemon.events("loop.blocked")
        assert first["function"] == second["function"] == third["function"] == "block"
        assert second["seconds"] >= 2 * first["seconds"] - 0.2
        assert third["seconds"] >= 2 * second["seconds"] - 0.2
        print(f"named {block_seconds(daemon.folder, first):.2f} s after the block began")

        answer = wait_cause(daemon, "loop-blocked")
        at = f"{daemon.module_path}:{line_number(daemon, '* 200')} in block"
        assert at in answer["causes"][0]["sentence"]
        assert not answer["moves"]
        code, said = run_command(daemon, "doctor")
        assert at in " ".join(said.split()), (code, said)
        found = [each for each in document(daemon, "doctor")["findings"] if "loop" in each["check"]]
        assert [each["about"] for each in found] == [f"{TOPIC}/0/{GROUP}"]


def test_loop_blocked_by_a_thread_names_no_handler_code(
    new_daemon: NewDaemon,
) -> None:
    """The report names no line of the handler, because the loop is waiting for another thread."""
    with new_daemon(code=COMMON + SLEEPS, consumer=SEVERAL) as daemon:
        daemon.send(["away"])
        event = daemon.wait_event("loop.blocked")
        assert "file" not in event
        assert event["seconds"] >= 2


def test_loop_blocked_after_0_disables_the_report(new_daemon: NewDaemon) -> None:
    with new_daemon(
        code=COMMON + SLEEPS, consumer=SEVERAL, daemon={"loop_blocked_after": 0}
    ) as daemon:
        daemon.send(["block"])
        daemon.wait_settled()
        assert daemon.events("loop.blocked") == []
