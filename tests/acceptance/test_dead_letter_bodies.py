"""A dead letter keeps the complete body, its hash or only its size, as the configuration says.

This module also tests messages that are too large.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from streamqd.cli import cli
from tests.support.daemon import TOPIC, Daemon

NewDaemon = Callable[..., Daemon]


def run(daemon: Daemon, *args: str, code: int = 0) -> Any:
    command = ["--config", str(daemon.config_path), "dlq", *args]
    done = CliRunner().invoke(cli, [*command, "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize(("policy", "end"), [("hash", "dead"), ("none", "exit 9")])
def test_dead_letter_without_a_body_is_not_replayed(
    new_daemon: NewDaemon, policy: str, end: str
) -> None:
    body = end
    with new_daemon(consumer={"dlq_body": policy, "max_crashes": 1}) as daemon:
        stream = daemon.keys.stream(TOPIC, 0)
        daemon.link.execute(
            "XADD", stream, "*", "payload", body, "key", "k", "headers", '{"a":"b"}'
        )
        daemon.wait_for(daemon.letters, what="it is dead")
        daemon.wait_settled()
        (letter,) = daemon.letters()
        assert letter["payload"] == ""
        assert letter["payloadBytes"] == str(len(body))
        digest = hashlib.sha256(body.encode()).hexdigest()
        assert letter.get("payloadSha256") == (digest if policy == "hash" else None)
        assert (letter["key"], letter["headers"]) == ("k", '{"a":"b"}')

        (row,) = run(daemon, "list", TOPIC)["rows"]
        assert run(daemon, "show", TOPIC, row["id"])["other"]["payloadBytes"] == str(len(body))
        # The dead letter cannot be replayed, but trying to do so loses nothing.
        told = run(daemon, "replay", TOPIC, "--all", "--yes", code=8)
        assert told["replayed"] == 0
        assert list(told["refused"]) == ["its body was not kept (dlq_body)"]
        assert len(daemon.letters()) == 1


@pytest.mark.parametrize("consumer", [{}, {"concurrency": 3, "order": "none"}], ids=["one", "many"])
def test_oversized_message_is_dead_lettered_unhandled(
    new_daemon: NewDaemon, consumer: dict[str, Any]
) -> None:
    with new_daemon(daemon={"max_message_bytes": "4KiB"}, consumer=consumer) as daemon:
        stream = daemon.keys.stream(TOPIC, 0)
        # This is the largest message that a producer may send.
        whole = "ok".ljust(4096)
        daemon.link.execute("XADD", stream, "*", "payload", whole, "key", "k" * 4096)
        giant = "ok".ljust(4097)
        daemon.link.execute("XADD", stream, "*", "payload", giant)
        daemon.link.execute("XADD", stream, "*", "payload", "ok", "headers", "h" * 9000)
        uids = daemon.send(["ok"])
        daemon.wait_run(uids[0], "end")
        daemon.wait_settled()

        letters = daemon.letters()
        assert [each["reason"] for each in letters] == ["too-large"] * 2
        assert letters[0]["payload"] == giant
        assert (
            "has 4,097 bytes, and daemon.max_message_bytes is 4,096" in letters[0]["errorMessage"]
        )
        assert "besides its payload it has 9,0" in letters[1]["errorMessage"]
        assert not daemon.events("worker.exited")

        # With a larger limit, the messages can be handled.
        epoch = daemon.epochs()[0]
        daemon.write_config(daemon={**daemon.tables["daemon"], "max_message_bytes": "64KiB"})
        assert daemon.stop() == 0
        daemon.start()
        daemon.wait_for(lambda: daemon.epochs()[0] > epoch, what="it owns the partition again")
        assert run(daemon, "replay", TOPIC, "--all", "--yes")["replayed"] == 2
        daemon.wait_settled()
        assert daemon.letters() == []


def test_inherited_oversized_message_is_dead_lettered(new_daemon: NewDaemon) -> None:
    daemon = new_daemon(consumer={"max_crashes": 5})
    with daemon:
        stream = daemon.keys.stream(TOPIC, 0)
        daemon.link.execute("XADD", stream, "*", "payload", "hold".ljust(8192))
        daemon.wait_for(lambda: daemon.pending(0), what="it runs")
        daemon.kill()
        daemon.wait_gone(10)
        daemon.write_config(daemon={**daemon.tables["daemon"], "max_message_bytes": "4KiB"})
        daemon.start()
        daemon.wait_for(daemon.letters, what="it is dead")
        assert [each["reason"] for each in daemon.letters()] == ["too-large"]


@pytest.mark.parametrize(
    ("code", "kept"),
    [
        ("text.replace('told to fail', '***')", "***, attempt 1"),
        ("1 / 0", "<redact_error failed: ZeroDivisionError>"),
    ],
)
@pytest.mark.parametrize("concurrency", [1, 4])
def test_redact_error_applies_to_the_error_of_a_dead_letter(
    new_daemon: NewDaemon, code: str, kept: str, concurrency: int
) -> None:
    """`redact_error` changes the error in a dead letter.

    No message is lost, even if `redact_error` itself fails.
    """
    daemon = new_daemon(consumer={"max_attempts": 1, "concurrency": concurrency})
    hook = f"\n\ndef redact_error(text):\n    return {code}\n"
    daemon.write_code(daemon.module_path.read_text() + hook)
    with daemon:
        daemon.send(["fail", "ok"])
        daemon.wait_for(daemon.letters, what="it is dead")
        daemon.wait_settled()
        (letter,) = daemon.letters()
        assert letter["errorMessage"] == kept
        assert "told to fail" not in "".join(letter.values())
        assert letter["errorClass"] == "ValueError"
        assert letter["payload"] == "fail"
        assert daemon.events("worker.crashed") == []
        assert "told to fail" not in daemon.log_path.read_text()
        assert daemon.stop() == 0


@pytest.mark.parametrize("hook", ["on_start(context)", "on_stop()"])
def test_redact_error_applies_to_logged_errors_of_hooks(new_daemon: NewDaemon, hook: str) -> None:
    daemon = new_daemon()
    code = f"""

def {hook}:
    raise ValueError("no mail to ann@x.org")

def redact_error(text):
    return text.replace("ann@x.org", "***")
"""
    daemon.write_code(daemon.module_path.read_text() + code)
    event, said = "worker.hook_failed", "ValueError: no mail to ***"
    daemon.start()
    if hook.startswith("on_start"):
        event, said = "worker.boot_failed", f"on_start of work:obey failed: {said}"
        daemon.wait_event(event)
    else:
        daemon.wait_event("daemon.ready")
    daemon.stop()
    assert {each["error"].partition(" (")[0] for each in daemon.events(event)} == {said}
    assert "ann@x.org" not in daemon.log_path.read_text()
