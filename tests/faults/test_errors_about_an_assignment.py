"""An internal error about one assignment harms only that assignment, whichever call raises it.

The test watches a daemon through a life with all kinds of events, and so finds every call that the
supervisor makes for an assignment. A new call that is not isolated therefore fails here.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from zlib import crc32

import pytest

from streamqd.model import Assignment
from tests.support import assignment_errors
from tests.support.assignment_errors import Places, Site
from tests.support.daemon import GROUP, TOPIC, Daemon

NewDaemon = Callable[..., Daemon]
PARTITIONS = 3
VICTIM = Assignment(TOPIC, 1, GROUP)
OTHERS_SECONDS = 2.0  # the longest time until the other assignments have handled a message
MISSED_MAX = 5
STEP_SECONDS = 1.5  # the wait before the next step is tried
FAST = {"kind": "fixed", "base": "50ms", "jitter": "none"}
# Errors of these calls are not logged: they belong to the log itself, or give up an assignment.
SILENT: set[str] = {"logs:event"}
TOLD = {"supervisor": "assignment.given_up", "housekeeper": "housekeeper.failed"}


class Life:
    """A watched daemon, and the steps of a life with all kinds of events."""

    def __init__(self, new_daemon: NewDaemon, folder: Path) -> None:
        self.missed: list[Site] = []  # calls that happen only when two processes race
        self.daemon = new_daemon(
            partitions=PARTITIONS,
            daemon={"crash_backoff": FAST, "crash_loop": 1000, "lease_ttl": "5s"},
            consumer={
                "timeout": "200ms",
                "hard_timeout": "400ms",
                "max_attempts": 2,
                "backoff": FAST,
            },
        )
        # Each partition gets two, so that a second one is always left to prefetch after the first.
        self.daemon.write_config(
            schedules=[
                {"name": f"{name}{at}", "topic": TOPIC, "partition": at, "every": every}
                | {"payload": "ok"}
                for at in range(PARTITIONS)
                for name, every in (("s", "1s"), ("t", "2s"))
            ]
        )
        self.places = Places(folder / "sites")
        self.daemon.module = assignment_errors.__name__
        self.daemon.environment[assignment_errors.VARIABLE] = str(self.places.sites)

    def steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "at rest", lambda: None
        yield "a crash", lambda: self.send_to_victim("segv")
        yield "a time limit", lambda: self.send_to_victim("sleep 0.3")
        yield "a hard time limit", lambda: self.send_to_victim("hold")
        yield "a dump", lambda: self.daemon.signal(signal.SIGUSR1)
        yield "a pause", self.pause
        yield "a reload", self.reload
        yield "an internal error", self.fail

    def send_to_victim(self, payload: str) -> None:
        self.daemon.send([payload], partition=VICTIM.partition)

    def pause(self) -> None:
        self.daemon.signal(signal.SIGTSTP)
        time.sleep(0.6)  # longer than one tick
        self.daemon.signal(signal.SIGCONT)

    def reload(self) -> None:
        mark = self.daemon.mark()
        self.daemon.signal(signal.SIGHUP)
        self.daemon.wait_for(
            lambda: (
                self.daemon.events("reload.finished", mark)
                or self.daemon.events("reload.stopped", mark)
            ),
            what="the end of the reload",
            timeout=30.0,
        )

    def fail(self) -> None:
        site = Site("supervisor", "supervisor.supervisor:Supervisor._reap_worker")
        self.places.arm(site, VICTIM, first=True)
        self.daemon.wait_for(lambda: not self.places.first_path.exists(), what="the first strike")

    def strike(self, site: Site, step: Callable[[], None]) -> None:
        """Make a call raise during a step that includes it, or when the assignment resumes."""
        self.places.arm(site, VICTIM)
        step()
        deadline = time.monotonic() + STEP_SECONDS
        while not self.places.struck and time.monotonic() < deadline:
            time.sleep(0.01)
        if not self.places.struck:
            self.fail()
        deadline = time.monotonic() + 4 * STEP_SECONDS  # tasks that run every 5 s have run by then
        while not self.places.struck and time.monotonic() < deadline:
            time.sleep(0.01)
        if not self.places.struck:
            self.places.strike_path.unlink(missing_ok=True)
            self.missed.append(site)

    def strike_at(self, site: Site, step: Callable[[], None]) -> float:
        """Strike once, and check that all assignments work again.

        Return the number of seconds that the other assignments took.
        """
        if site.role == "housekeeper":
            self.replace_housekeeper()  # so that no assignment was given up before this strike
        mark = self.daemon.mark()
        self.strike(site, step)
        took = self.others_work(str(site), retried=site.role == "housekeeper")
        if site.name not in SILENT and site not in self.missed:
            told = self.daemon.wait_event(TOLD[site.role], after=mark)
            assert (told["topic"], told["partition"]) == (VICTIM.topic, VICTIM.partition)
            assert "StruckError" in told["traceback"]
        assert not self.daemon.events("housekeeper.exited", mark)
        self.victim_works(str(site))
        return took

    def replace_housekeeper(self) -> None:
        mark = self.daemon.mark()
        os.kill(self.daemon.titles()["streamqd: housekeeper"], signal.SIGKILL)
        self.daemon.wait_event("housekeeper.started", after=mark)

    def others_work(self, after: str, *, retried: bool) -> float:
        """Send a message to each of the other assignments, and wait until all are handled.

        Return the number of seconds until then. If `retried` is True, each message fails once, so
        the housekeeper must promote its retry.
        """
        payload, runs = ("fail", 2) if retried else ("ok", 1)
        began = time.monotonic()
        for number in range(PARTITIONS):
            if number != VICTIM.partition:
                (uid,) = self.daemon.send([payload], partition=number)
                self.daemon.wait_for(
                    lambda uid=uid: len(self.daemon.ledger.records_for(uid, "start")) >= runs,
                    timeout=OTHERS_SECONDS,
                    what=f"the others work after {after}",
                )
        return time.monotonic() - began

    def victim_works(self, after: str) -> None:
        (uid,) = self.daemon.send(["ok"], partition=VICTIM.partition)
        self.daemon.wait_for(
            lambda: self.daemon.ledger.records_for(uid, "end"), what=f"the unit works after {after}"
        )


@pytest.fixture
def life(new_daemon: NewDaemon, tmp_path: Path) -> Iterator[Life]:
    made = Life(new_daemon, tmp_path)
    with made.daemon:
        yield made


# A strike consists mostly of waiting, so the calls are divided among lives that run in parallel.
# Every life finds calls that are not isolated. All but the first life of each role are slow, and
# take half a minute each.
SHARES = {"supervisor": 4, "housekeeper": 3}


@pytest.mark.promise
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("role", "share"),
    [
        pytest.param(role, share, marks=[pytest.mark.slow] * (share > 0))
        for role, count in SHARES.items()
        for share in range(count)
    ],
)
def test_error_of_any_call_affects_only_its_assignment(life: Life, role: str, share: int) -> None:
    """The other assignments continue after an error of any call, and the affected one later."""
    steps: list[tuple[Callable[[], None], list[Site]]] = []
    known: set[Site] = set()
    for name, step in life.steps():
        step()
        life.victim_works(name)
        found = life.places.read()
        steps.append((step, [each for each in found if each not in known and each.role == role]))
        known |= found.keys()
    alone = [str(site) for site, isolated in life.places.read().items() if not isolated]
    assert "\n".join(sorted(alone)) == "", "calls for a unit without isolation"
    calls = sum(len(sites) for _, sites in steps)
    assert calls >= 15
    slowest, struck = 0.0, 0
    for step, sites in steps:
        for site in sites:
            if crc32(str(site).encode()) % SHARES[role] == share:
                slowest, struck = max(slowest, life.strike_at(site, step)), struck + 1
    print(f"{struck} of {calls} calls of the {role}; the others took {slowest:.2f} s at most")
    assert struck
    assert len(life.missed) <= MISSED_MAX, life.missed
    assert life.daemon.stop() == 0
