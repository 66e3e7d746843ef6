"""Log records of handlers, and the lines that the daemon logs when a handler fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.shapes import SHAPES

NewDaemon = Callable[..., Daemon]
Line = dict[str, Any]

LATER = {"kind": "fixed", "base": "1h", "max": "1h", "jitter": "none"}

LOGGING = """
import asyncio, logging, sys, threading, time

from streamqd import Dead, Message, Retry

log = logging.getLogger("shop")
library = logging.getLogger("library")
library.addHandler(logging.NullHandler())


def do(message):
    word, _, rest = message.text().partition(" ")
    log.debug("debugged %s", message.text())
    log.info("handled %s", message.text())
    if word == "library":
        library.warning("said %s", rest)
    if word == "forge":
        log.warning("a\\nmessage.dead_lettered 12:00:00 ERROR worker[1] b\\r\\x1b[31m")
    if word == "wrong":
        log.warning("%d things", "many")
    if word == "declined":
        raise ValueError("the card was declined")
    if word == "dead":
        raise Dead("the card was declined")


def plain(message: Message) -> None:
    do(message)


def slow(message: Message) -> None:
    time.sleep(0.02)
    do(message)


async def coroutine(message: Message) -> None:
    await asyncio.sleep(0.01)
    do(message)


def batch(messages: list[Message]) -> None:
    log.info("a batch of %d", len(messages))


def on_start(context):
    log.info("started")
"""


def read_log_records(daemon: Daemon, logger: str = "shop") -> list[Line]:
    """Return the records of a handler's logger from the JSON log."""
    lines = daemon.log_path.read_text().splitlines()
    records = (json.loads(line) for line in lines if line.startswith("{"))
    return [record for record in records if record.get("logger") == logger]


@pytest.mark.parametrize("shape", SHAPES)
def test_handler_logs_are_written_without_setup(new_daemon: NewDaemon, shape: str):
    """`logging.info` is written as JSON, with the uid of its message."""
    with new_daemon(code=LOGGING, partitions=2, consumer=SHAPES[shape]) as daemon:
        uids = daemon.send([f"ok {number}" for number in range(30)])
        daemon.wait_settled()
        assert daemon.stop() == 0

    lines = [line for line in read_log_records(daemon) if line["msg"].startswith("handled")]
    assert {line["msg"]: line["uid"] for line in lines} == {
        f"handled ok {number}": uid for number, uid in enumerate(uids)
    }
    for line in lines:
        assert (line["topic"], line["group"], line["attempt"]) == (TOPIC, GROUP, 1)
        assert line["uid"].split("/")[1] == str(line["partition"])
        assert (line["level"], line["role"]) == ("info", "worker")
    started = [line for line in read_log_records(daemon) if line["msg"] == "started"]
    assert {line["partition"] for line in started} == {0, 1}
    assert not any("uid" in line for line in started)
    assert not [line for line in read_log_records(daemon) if line["level"] == "debug"]


def test_batch_log_record_names_its_first_and_last_message(new_daemon: NewDaemon):
    """The log record of a batch handler names the first and the last message of its batch."""
    with new_daemon(code=LOGGING, consumer={"handler": "work:batch"}) as daemon:
        uids = daemon.send(["ok"] * 40)
        daemon.wait_settled()
        assert daemon.stop() == 0
    named = [line["uid"].split("..") for line in read_log_records(daemon) if "uid" in line]
    assert named[0][0] == uids[0]
    assert named[-1][-1] == uids[-1]


def test_handler_logs_follow_log_level(new_daemon: NewDaemon):
    """Handler records below `log.level` are not written."""
    daemon = new_daemon(code=LOGGING, consumer={"handler": "work:plain"})
    for level, heard in (("debug", {"debug", "info"}), ("warning", {"warning"})):
        daemon.write_config(log={"format": "json", "level": level})
        daemon.log_path.write_text("")
        daemon.start()
        daemon.send(["library x", "wrong x"])
        daemon.wait_settled()
        assert daemon.stop() == 0
        assert {line["level"] for line in read_log_records(daemon)} == heard | {"warning"}
        assert [line["msg"] for line in read_log_records(daemon, "library")] == ["said x"]
        assert any("%d things" in line["msg"] for line in read_log_records(daemon)), (
            "it is not lost"
        )


def test_handler_text_cannot_forge_a_log_line(new_daemon: NewDaemon):
    """A handler's record cannot imitate a line of the daemon or control a terminal."""
    daemon = new_daemon(code=LOGGING, consumer={"handler": "work:plain"})
    daemon.write_config(log={"format": "text"})
    daemon.start()
    daemon.send(["forge"])
    daemon.wait_settled()
    assert daemon.stop() == 0
    text = daemon.log_path.read_text()
    (line,) = [line for line in text.splitlines() if "message.dead_lettered" in line]
    assert line.startswith("shop ")
    assert f"topic={TOPIC} partition=0 group={GROUP} uid={TOPIC}/0/" in line
    assert "\x1b" not in text


OWN = {
    "basicConfig at import": "logging.basicConfig(filename='own.log', format='%(uid)s %(message)s',"
    " level='DEBUG')",
    "dictConfig at import": """import logging.config
logging.config.dictConfig({
    "version": 1,
    "formatters": {"f": {"format": "%(uid)s %(message)s"}},
    "handlers": {"h": {"class": "logging.FileHandler", "filename": "own.log", "formatter": "f"}},
    "root": {"level": "DEBUG", "handlers": ["h"]},
    "loggers": {"shop": {"level": "DEBUG"}},
})""",
    "a handler of its logger": """handler = logging.FileHandler("own.log")
handler.setFormatter(logging.Formatter("%(uid)s %(message)s"))
log.addHandler(handler)
log.setLevel("DEBUG")""",
    "basicConfig in on_start": """

def on_start(context):
    logging.basicConfig(filename="own.log", format="%(uid)s %(message)s", level="DEBUG")
""",
}


@pytest.mark.parametrize("how", OWN)
def test_logging_setup_of_a_handler_takes_precedence(new_daemon: NewDaemon, how: str):
    """If a handler configures logging itself, its records go only where that setup sends them."""
    code = LOGGING + "\n\n" + OWN[how] + "\n"
    with new_daemon(code=code, consumer={"handler": "work:plain"}) as daemon:
        (uid,) = daemon.send(["dead letter"])
        daemon.wait_settled()
        assert daemon.stop() == 0
    own = (daemon.folder / "own.log").read_text().splitlines()
    assert f"{uid} debugged dead letter" in own
    assert f"{uid} handled dead letter" in own
    assert not [line for line in read_log_records(daemon) if "dead letter" in line["msg"]]
    assert daemon.events("message.dead_lettered"), "the daemon's own lines stay where they were"


# --- failures -------------------------------------------------------------------------------------


def line_number(code: str, text: str) -> int:
    return next(n for n, line in enumerate(code.splitlines(), 1) if text in line)


def list_retries(daemon: Daemon, *options: str) -> str:
    verb = ["--config", daemon.config_path.name, "retry", "list", TOPIC, GROUP, *options]
    return subprocess.run(
        [sys.executable, "-m", "streamqd", *verb],
        cwd=daemon.folder,
        env=daemon._environment(),
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_first_failure_is_logged_with_its_location(new_daemon: NewDaemon):
    """The log, `retry list` and its --json show the error, file and line of a failure."""
    daemon = new_daemon(code=LOGGING, consumer={"handler": "work:plain", "backoff": LATER})
    with daemon:
        failed, dead = daemon.send(["declined", "dead"])
        daemon.wait_event("message.dead_lettered")
        retry = daemon.wait_event("message.retried")
        where = f"work.py:{line_number(LOGGING, 'raise ValueError')}"
        assert (retry["uid"], retry["error"]) == (failed, "ValueError: the card was declined")
        assert retry["at"] == where
        (end,) = daemon.events("message.dead_lettered", uid=dead)
        assert end["error"] == "streamqd.handlers.Dead: the card was declined"
        assert end["at"] == f"work.py:{line_number(LOGGING, 'raise Dead')}"
        assert "traceback" not in retry | end

        daemon.wait_for(
            lambda: json.loads(list_retries(daemon, "--json"))["rows"], what="it is delayed"
        )
        (row,) = json.loads(list_retries(daemon, "--json"))["rows"]
        assert (row["error"], row["at"]) == ("ValueError: the card was declined", where)
        table = list_retries(daemon)
        assert "ERROR" in table.splitlines()[0]
        assert f"ValueError: the card was declined ({where})" in table
        assert daemon.stop() == 0


def test_log_level_debug_adds_the_traceback(new_daemon: NewDaemon):
    """With `log.level = "debug"`, the daemon also logs the complete traceback of a failure."""
    daemon = new_daemon(code=LOGGING, consumer={"handler": "work:plain", "backoff": LATER})
    daemon.write_config(log={"format": "json", "level": "debug"})
    with daemon:
        daemon.send(["declined", "dead"])
        for name in ("message.retried", "message.dead_lettered"):
            trace = daemon.wait_event(name)["traceback"]
            assert trace.startswith("Traceback (most recent call last):")
            assert 'work.py", line' in trace
            assert "the card was declined" in trace
        assert daemon.stop() == 0


@pytest.mark.parametrize(
    ("setting", "error", "at"),
    [("none", "", False), ("class", "ValueError", True), ("redact", "ValueError: #", True)],
)
def test_redacted_errors_are_not_logged(new_daemon: NewDaemon, setting: str, error: str, at: bool):
    """`dlq_error` and `redact_error` apply both to the log and to the error stored with a retry."""
    code, consumer = LOGGING, {"handler": "work:plain", "backoff": LATER}
    if setting == "redact":
        code += "\n\ndef redact_error(text):\n    return '#'\n"
    else:
        consumer["dlq_error"] = setting
    daemon = new_daemon(code=code, consumer=consumer)
    daemon.write_config(log={"format": "json", "level": "debug"})
    with daemon:
        daemon.send(["declined", "dead"])
        daemon.wait_event("message.dead_lettered")
        retry = daemon.wait_event("message.retried")
        assert retry["error"] == error
        assert ("at" in retry) is at
        daemon.wait_for(
            lambda: json.loads(list_retries(daemon, "--json"))["rows"], what="it is delayed"
        )
        (row,) = json.loads(list_retries(daemon, "--json"))["rows"]
        assert (row["error"], bool(row["at"])) == (error, at)
        assert "the card was declined" not in daemon.log_path.read_text()
        assert daemon.stop() == 0


def test_long_error_is_truncated(new_daemon: NewDaemon):
    """A message that waits for its retry keeps at most 500 bytes of its error."""
    code = LOGGING.replace('ValueError("the card was declined")', 'ValueError("\\u00e4" * 50_000)')
    with new_daemon(code=code, consumer={"handler": "work:plain", "backoff": LATER}) as daemon:
        daemon.send(["declined"])
        daemon.wait_event("message.retried")
        daemon.wait_for(
            lambda: json.loads(list_retries(daemon, "--json"))["rows"], what="it is delayed"
        )
        (row,) = json.loads(list_retries(daemon, "--json"))["rows"]
        assert 200 < len(row["error"].encode()) <= 500
        assert daemon.stop() == 0


def test_print_to_a_closed_pipe_fails_no_message(new_daemon: NewDaemon):
    """With `streamqd | head -2`, printed text is lost, but every message is acknowledged."""
    code = """
def obey(message):
    print(message.text(), flush=True)
"""
    daemon = new_daemon(code=code, consumer={"max_attempts": 1})
    with daemon.log_path.open("ab") as log:
        reader, writer = os.pipe()
        with os.fdopen(writer, "wb") as output:
            daemon.launch(output, log)
        daemon.wait_event("daemon.ready")
        os.close(reader)
        daemon.send([f"message {number}" for number in range(20)])
        daemon.wait_settled()
        assert daemon.letters() == []
        assert daemon.stop() == 0
