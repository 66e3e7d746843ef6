"""An operator finds the causes of last night's dead letters and replays them safely."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from streamqd.cli import cli
from tests.support.daemon import TOPIC, Daemon

pytestmark = pytest.mark.promise

NewDaemon = Callable[..., Daemon]

# Messages fail in two ways, one of them inside a library. One message kills its process.
BROKEN = """
import json, os
from streamqd import Message
from tests.support.ledger import Ledger

ledger = Ledger.from_environment()

def price(text):
    return json.loads(text)["price"]

def obey(message: Message) -> None:
    with ledger.run(message):
        if message.text() == "exit":
            os._exit(9)
        if message.text().startswith("{"):
            price(message.text())
"""
MENDED = (
    BROKEN.split("def price", 1)[0]
    + """
def obey(message: Message) -> None:
    with ledger.run(message):
        pass
"""
)


def run_dlq(daemon: Daemon, *args: str) -> Any:
    command = ["--config", str(daemon.config_path), "dlq", *args, "--json"]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_dead_letters_are_replayed_after_a_fix(new_daemon: NewDaemon) -> None:
    consumer = {"max_attempts": 1, "max_crashes": 1}
    with new_daemon(partitions=2, consumer=consumer, code=BROKEN) as daemon:
        sent = daemon.send(["{nope}", "{no}", '{"cost": 1}', "exit", "fine"])
        daemon.wait_for(lambda: len(daemon.letters()) == 4, what="four letters")
        daemon.wait_settled()

        causes = run_dlq(daemon, "stats", TOPIC, "--since", "12h")["causes"]
        died = {(each["error_class"], each["frame"], each["reason"]): each for each in causes}
        assert {name: each["count"] for name, each in died.items()} == {
            ("json.decoder.JSONDecodeError", "work.py:price", "attempts"): 2,
            ("KeyError", "work.py:price", "attempts"): 1,
            ("", "", "crashes"): 1,
        }
        assert all(len(each["fingerprint"]) == 12 for each in causes)
        assert all(each["handler"] == "work:obey" for each in causes)

        before = run_dlq(daemon, "replay", TOPIC, "--all", "--dry-run")
        [receiver] = before["receivers"]
        assert (before["dead_letters"], receiver["owners"]) == (4, ["one"])
        assert receiver["same_worker"] >= 1
        assert "the worker that failed still runs" in before["notes"][0]
        assert any("crashed their worker" in note for note in before["notes"])

        epochs = daemon.epochs()
        daemon.write_code(MENDED)
        daemon.signal(signal.SIGHUP)
        daemon.wait_for(
            lambda: all(daemon.epochs()[number] > epoch for number, epoch in epochs.items()),
            what="new workers",
        )

        plan = run_dlq(daemon, "replay", TOPIC, "--all", "--dry-run")
        assert plan["receivers"][0]["same_worker"] == 0
        assert any("moved after these failures" in note for note in plan["notes"])
        [parse] = [each for each in causes if each["count"] == 2]
        mine = ("--fingerprint", parse["fingerprint"])
        assert run_dlq(daemon, "replay", TOPIC, *mine, "--yes")["replayed"] == 2
        assert run_dlq(daemon, "replay", TOPIC, "--all", "--all-groups", "--yes")["replayed"] == 2
        daemon.wait_settled()

        assert daemon.letters() == []
        runs = [record.uid for record in daemon.ledger.records() if record.kind == "end"]
        assert sorted({*runs}) == sorted(sent)
        deeds = run_dlq(daemon, "audit", TOPIC)["entries"]
        assert [each["counts"] for each in deeds] == [{"replayed": 2}, {"replayed": 2}]
