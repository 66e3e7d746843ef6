"""If a rate throttles a daemon, every view reports it, and neither a drain nor a handover waits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from streamqd.admin import growth
from streamqd.config import load
from streamqd.producer import Producer
from tests.integration.test_throttle import respects_rate
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.ledger import Audit

NewDaemon = Callable[..., Daemon]


def run_command(daemon: Daemon, *arguments: str, code: int = 0) -> Any:
    """Return the JSON output of a command."""
    ended = subprocess.run(
        [sys.executable, "-m", "streamqd", "--config", daemon.config_path.name, *arguments],
        cwd=daemon.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    return json.loads(ended.stdout)


def test_throttled_partition_is_reported_and_drains_quickly(
    new_daemon: NewDaemon,
):
    daemon = new_daemon(consumer={"rate": "1/h"}, http="unix:./http.sock")
    with daemon:
        uids = daemon.send(["ok"] * 5)
        daemon.wait_run(uids[0], "end")

        def held() -> bool:
            (assignment,) = run_command(daemon, "status", "--json")["assignments"]
            return bool(assignment["worker"] == "throttled")

        daemon.wait_for(held, what="status says that it is throttled")
        (answer,) = run_command(daemon, "why", f"{TOPIC}/0/{GROUP}", "--json", code=1)["answers"]
        assert answer["causes"][0]["word"] == "throttled"
        assert "rate of" in answer["causes"][0]["sentence"]
        assert daemon.stop() == 0
        assert daemon.ledger.finished_uids(GROUP) == {uids[0]}
        assert daemon.pending_uids() <= set(uids[1:])


def test_handover_continues_the_rate(new_daemon: NewDaemon):
    """A handover continues the rate.

    The check allows for starts that are recorded late, because the handler writes them.
    """
    daemon = new_daemon(consumer={"rate": "20/s", "rate_burst": 2})
    with daemon:
        daemon.send(["ok"] * 40)
        daemon.wait_for(lambda: daemon.ledger.count("end") >= 5, what="some have run")
        old = daemon.pids()[0]
        daemon.signal(signal.SIGHUP)
        daemon.wait_event("reload.finished")
        daemon.wait_settled()
        starts = daemon.ledger.records("start")
        assert {each.pid for each in starts} == {old, daemon.pids()[0]}
        assert daemon.ledger.audit(GROUP) == Audit()
        late = 1 + int(20 * max_lateness(daemon))
        assert respects_rate([int(each.at * 1e9) for each in starts], 20, 2 + late)
        assert daemon.stop() == 0


def test_group_rate_is_unchanged_by_a_growth(new_daemon: NewDaemon):
    """With `rate_per = "group"`, twice as many partitions do not start more runs per second.

    The check allows one immediate run per partition, and starts that are recorded late.
    """
    daemon = new_daemon(partitions=2, consumer={"rate": "40/s", "rate_per": "group"})

    def rates() -> list[float]:
        return [
            assignment["rate"]
            for assignment in run_command(daemon, "top", "--json", "--once")["assignments"]
        ]

    with daemon:
        daemon.send(["ok"] * 60)
        daemon.wait_settled()
        daemon.wait_for(lambda: rates() == [20.0, 20.0], what="each of two partitions has a half")
        daemon.wait_for(
            lambda: growth.grow(daemon.store, TOPIC, 4).done, what="the topic has grown"
        )
        daemon.write_config(topics={TOPIC: {"partitions": 4}})
        daemon.signal(signal.SIGHUP)
        daemon.wait_event("reload.finished")
        daemon.partitions = 4
        daemon.wait_for(lambda: rates() == [10.0] * 4, what="each of four partitions has a quarter")
        daemon.send(["ok"], partition=0)  # makes the producer load the new count
        daemon.send(["ok"] * 60)
        daemon.wait_settled()
        starts = daemon.ledger.records("start")
        assert len({each.uid for each in starts}) == 121
        late = 1 + int(40 * max_lateness(daemon))
        assert respects_rate(sorted(int(each.at * 1e9) for each in starts), 40, 4 + late)
        daemon.send(["ok"] * 200)

        def held() -> bool:
            assignments = run_command(daemon, "top", "--json", "--once")["assignments"]
            return assignments[0]["state"] == "throttled"

        daemon.wait_for(held, what="partition 0 waits for its share")
        (answer,) = run_command(daemon, "why", f"{TOPIC}/0/{GROUP}", "--json", code=1)["answers"]
        assert "10 runs/s, its share of the group's rate" in answer["causes"][0]["sentence"]
        assert daemon.stop() == 0


def max_lateness(daemon: Daemon) -> float:
    """Return the seconds of the longest run, because no start is recorded later than that."""
    runs = daemon.ledger.records("start", "end")
    begun = {each.uid: each.at for each in runs if each.kind == "start"}
    return max(each.at - begun[each.uid] for each in runs if each.kind == "end")


def test_mailings_example_sends_its_mails(new_daemon: NewDaemon):
    daemon = new_daemon(groups=[])
    daemon.write_config(
        topics={"mailings": {"partitions": 1}},
        daemon=daemon.tables["daemon"]
        | {"handlers": ["streamqd.examples.mailings"], "state_dir": "state"},
    )
    with daemon, Producer(settings=load(daemon.config_path)) as producer:
        sent = [producer.send("mailings", f"{name}@example.com") for name in ("ann", "bob")]
        files = [daemon.folder / f"state/mailings/{each.replace('/', '-')}" for each in sent]
        daemon.wait_for(lambda: all(each.exists() for each in files), what="both are sent")
        assert files[0].read_text() == "To: ann@example.com\n"
        assert daemon.stop() == 0
