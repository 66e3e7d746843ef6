"""A soak: a working fleet, a producer, a nemesis, and checks that run all the time.

    with Trial(folder, server, planned, partitions=8, ...) as trial:
        trial.run()
        outcome = trial.finish()

Each instance of the fleet reaches Redis through its own fault proxy, and so does the producer. The
checks do not use a proxy.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from streamqd.errors import RedisResponseError, RedisUnavailableError
from streamqd.store.client import Connection, connect
from tests.support.causes import DEADLY, Strike
from tests.support.conservation import Conservation
from tests.support.daemon import ROOT, Daemon, Event
from tests.support.ledger import VARIABLE
from tests.support.nemesis import PATIENCE, Nemesis, PlannedStrike, Victim
from tests.support.proxy import FaultProxy
from tests.support.servers import ProcessServer
from tests.support.verdict import ATTEMPTS_MAX, ChargeReport, Report, judge
from tests.support.waiting import wait_until

GROUPS = ("bill", "ship")
EACH = "ship"  # the group that acknowledges each message before it starts the next one
WORK = Path(__file__).with_name("soak_work.py")
STEP_SECONDS = 0.02
CHECK_SECONDS = 0.25
SETTLE_SECONDS = 60.0
CRASHES_MAX = 100  # more than the nemesis causes for any message: none is dead-lettered
HARD_TIMEOUT = 4.0  # seconds; longer than any run, and shorter than the longest stop of a worker


@dataclass(frozen=True)
class Outcome:
    """The outcome of a trial."""

    report: Report
    strikes: list[Strike]
    passed: int
    checks: int
    violations: list[str]
    crashed: list[int]  # pids of workers that died although no strike hit them
    fenced: int
    events: dict[str, int]  # how often some log events occurred in the instances
    heal_seconds: float  # seconds from the end of the last strike until no work was left

    def wrong(self) -> dict[str, object]:
        """Return all faults of the fleet. The result is empty if there are none."""
        found: dict[str, object] = dict(self.report.faults_of_ours())
        if self.violations:
            found["conservation"] = self.violations
        if self.crashed:
            found["crashed by themselves"] = self.crashed
        return found


class Trial:
    """A soak from its start to its verdict."""

    def __init__(
        self,
        folder: Path,
        server: ProcessServer,
        *,
        names: str = "abc",
        partitions: int = 8,
        lease_ttl: float = 2.0,
        rate: float = 90.0,
        seed: int = 1,
        consumer: dict[str, Any] | None = None,
    ) -> None:
        self._open = ExitStack()
        self._server = server
        self._seed, self._rate = seed, rate
        tables = {
            "lease_ttl": f"{lease_ttl}s",
            "rebalance_delay": "200ms",
            "rebalance_hold": "500ms",
            "rebalance_moves": 8,
            "crash_backoff": {"kind": "fixed", "base": "1ms"},
            "crash_loop": 1000,
        }
        one = {
            "max_attempts": ATTEMPTS_MAX,
            "max_crashes": CRASHES_MAX,
            "hard_timeout": f"{HARD_TIMEOUT}s",
            "backoff": {"kind": "exponential", "base": "50ms", "max": "500ms"},
            **(consumer or {}),
        }
        self.link = self._open_link(connect(server.settings, timeout=10.0, name="test:trial"))
        self._steer = self._open_link(connect(server.settings, timeout=10.0, name="test:steer"))
        self.victims: list[Victim] = []
        for name in names:
            proxy = self._open.enter_context(FaultProxy(server.socket_path, remember=0))
            daemon = Daemon(
                *(folder, server.url),
                name=name,
                partitions=partitions,
                groups=GROUPS,
                daemon=tables,
                consumer=one,
                code=WORK.read_text(),
            )
            self._open.callback(daemon.close)
            for each in daemon.tables["consumers"]:
                each["ack"] = "each" if each["group"] == EACH else "batched"
            # The trial's own commands do not pass through the proxy.
            topics = {"orders": {"partitions": partitions, "retention": {"max_length": 100}}}
            daemon.write_config(redis={"url": proxy.url}, topics=topics)
            self.victims.append(Victim(daemon, proxy))
        self.first = self.victims[0].daemon
        self.ledger = self.first.ledger
        self._producer_proxy = self._open.enter_context(FaultProxy(server.socket_path, remember=0))
        self._producer: subprocess.Popen[bytes] | None = None
        self.conservation = Conservation(
            self.link, self.first.keys, self.first.assignments(), self.ledger
        )
        self.nemesis: Nemesis | None = None

    def _open_link(self, link: Connection) -> Connection:
        self._open.callback(link.close)
        return link

    def __enter__(self) -> Self:
        try:
            for victim in self.victims:
                victim.daemon.start()
            for victim in self.victims:
                victim.daemon.wait_event("daemon.ready", timeout=30.0)
            self.first.wait_for(
                self._is_distributed, timeout=30.0, what="all partitions have workers"
            )
            self._start_producer()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._producer is not None and self._producer.poll() is None:
            self._producer.kill()
            self._producer.wait(10)
        if self._server.running:
            self._server.resume()
        self._open.close()

    def _is_distributed(self) -> bool:
        """Return True if each assignment has a worker, and each instance has at least one."""
        shares = [len(victim.workers()) for victim in self.victims]
        return all(shares) and sum(shares) == len(self.first.assignments())

    def _start_producer(self) -> None:
        direct = dict(self.first.tables["redis"])
        path = self.first.folder / "producer.toml"
        text = self.first.config_path.read_text()
        path.write_text(text.replace(direct["url"], self._producer_proxy.url))
        command = [sys.executable, "-m", "tests.support.soak_producer", str(path)]
        command += [str(self._rate), str(self._seed)]
        environment = os.environ | {VARIABLE: str(self.ledger.path), "PYTHONPATH": str(ROOT)}
        with (self.first.folder / "producer.log").open("ab") as log:
            self._producer = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    # --- steps ---

    def run(self, planned: list[PlannedStrike]) -> None:
        """Carry out the nemesis's plan, and check all the time."""
        nemesis = self.nemesis = Nemesis(
            planned, self._server, self.victims, [self._producer_proxy], self._steer
        )
        check_at = 0.0

        def step() -> bool:
            nonlocal check_at
            nemesis.step()
            assert self._producer is not None
            assert self._producer.poll() is None, self._producer_log()
            if time.monotonic() >= check_at and not nemesis.server_away:
                self._check()
                check_at = time.monotonic() + CHECK_SECONDS
            return nemesis.is_over

        longest = planned[-1].at + 10 * PATIENCE
        wait_until(step, timeout=longest, every=STEP_SECONDS, what="the plan is carried out")

    def finish(self) -> Outcome:
        """Stop the producer, wait until all messages are settled, stop the fleet, and judge."""
        healed = time.monotonic()
        assert self._producer is not None
        self._producer.send_signal(signal.SIGTERM)
        assert self._producer.wait(20) == 0, self._producer_log()
        # No fault is left, so every message reaches an owner and is settled.
        self._wait_settled()
        heal_seconds = time.monotonic() - healed
        for victim in self.victims:
            assert victim.daemon.stop() == 0, victim.daemon.tail()  # fails if a process is left
        self._check()
        assert self.nemesis is not None
        strikes = self.nemesis.strikes
        daemons = [victim.daemon for victim in self.victims]
        hit = {pid for strike in strikes if strike.kind in DEADLY for pid in strike.pids}
        crashes = [event for one in daemons for event in one.events("worker.crashed")]
        acquired = [event for one in daemons for event in one.events("lease.acquired")]
        names = (
            "worker.crashed",
            "lease.lost",
            "lease.renewed_late",
            "lease.acquired",
            "redis.lost",
        )
        return Outcome(
            report=judge(
                *(self.ledger.records(), strikes, self.conservation.dead_letter_numbers()),
                charges=self.conservation.charges,
                each={EACH},
                blames=[*_read_charges(crashes, "charged"), *_read_charges(acquired, "suspected")],
            ),
            strikes=strikes,
            passed=self.nemesis.passed,
            checks=self.conservation.checks,
            violations=self.conservation.violations,
            crashed=sorted({event["child"] for event in crashes} - hit),
            fenced=sum(len(one.events("request.fenced")) for one in daemons),
            events={name: sum(len(one.events(name)) for one in daemons) for name in names},
            heal_seconds=round(heal_seconds, 2),
        )

    def evidence(self, outcome: Outcome) -> str:
        """Return the evidence on everything that is unexplained: runs, strikes and log lines."""
        lines: list[str] = []
        for duplicate in outcome.report.unexplained:
            lines += [
                "",
                str(duplicate),
                *self._describe_runs(outcome, duplicate.number, duplicate.pids),
            ]
        for sentence in outcome.report.overcharged:
            number = sentence.partition(" ")[0]
            records = [r for r in self.ledger.records() if r.text.startswith(f"{number} ")]
            pids = {record.pid for record in records if record.kind == "start"}
            lines += ["", sentence, *self._describe_runs(outcome, number, pids)]
        return "\n".join(lines)

    def _describe_runs(self, outcome: Outcome, number: str, pids: Collection[int]) -> list[str]:
        """Return a message's runs, the acts of its processes near them, and its log lines."""
        records = [r for r in self.ledger.records() if r.text.startswith(f"{number} ")]
        at = max(record.at for record in records)
        ours = [r for r in self.ledger.records() if r.pid in pids and abs(r.at - at) < 15]
        near = [one for one in outcome.strikes if at - 15 < one.ended and one.began < at + 15]
        wanted = [f'"{name}":{pid},' for pid in pids for name in ("pid", "child")]
        wanted += [
            uid.rpartition("/")[2] for uid in {record.uid for record in records if record.uid}
        ]
        logged = [
            line
            for victim in self.victims
            for line in victim.daemon.log_path.read_text().splitlines()
            if any(each in line for each in wanted)
        ]
        told = [*map(str, records), "its processes:", *map(str, ours), *map(str, near)]
        return told + sorted(logged, key=lambda line: line.partition('"ts":')[2])[-60:]

    def _wait_settled(self) -> None:
        def done() -> bool:
            self._check()
            return not self.conservation.count_unfinished()

        try:
            wait_until(done, timeout=SETTLE_SECONDS, what="everything is settled", every=0.1)
            wait_until(self._is_distributed, timeout=SETTLE_SECONDS, what="all have workers")
        except AssertionError as error:
            tails = "\n".join(victim.daemon.tail(15) for victim in self.victims)
            raise AssertionError(
                f"{error}: {self.conservation.count_unfinished()}\n{tails}"
            ) from None

    def _check(self) -> None:
        try:
            self.conservation.check()
        except (RedisUnavailableError, RedisResponseError):
            assert self.nemesis is not None
            # The connection was killed together with the others. The next check opens a new one.

    def _producer_log(self) -> str:
        return (self.first.folder / "producer.log").read_text()


def _read_charges(events: list[Event], name: str) -> list[ChargeReport]:
    """Return the charges that the events report. The field `name` holds the place."""
    return [
        ChargeReport(each.get("child", 0), each["partition"], each["group"], each[name])
        for each in events
        if each.get(name)
    ]
