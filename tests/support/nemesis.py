"""The nemesis: it strikes a fleet according to a seeded plan, and logs each target and time.

The plan is made before anything runs. It depends only on the seed, and gives the time, kind, target
and duration of each strike. Each kind is a generator: it strikes, yields the condition (or the
time) that it waits for, and then heals. This module does not judge the result; `verdict` judges it,
based on the log.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import psutil

from streamqd.admin import directives
from streamqd.admin.published import Fleet
from streamqd.errors import RequestRefusedError, StreamqdError
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.support.causes import Strike
from tests.support.daemon import Daemon
from tests.support.proxy import Fault, FaultProxy
from tests.support.servers import ProcessServer

PATIENCE = 60.0  # the test fails if a fault does not heal within this many seconds
Wait = Callable[[], object]
Course = Generator[Wait, None, None]

FAULTS = (
    *("kill worker", "kill worker", "kill worker", "kill housekeeper", "kill supervisor"),
    *("stop worker", "stop supervisor", "stop host", "cut off"),
    *("drop reply", "reset", "half open", "stop redis", "kill redis"),
    *("flush scripts", "kill clients", "order", "reload", "restart"),
)
PEACE = ("restart", "order", "reload")


class PlannedStrike(NamedTuple):
    """A strike of a plan.

    `chance` in [0, 1) selects the victim, and `seconds` is the duration of the strike.
    """

    at: float
    kind: str
    chance: float
    seconds: float


def plan(
    seed: int, seconds: float, every: float, lasting: tuple[float, float], kinds: Sequence[str]
) -> list[PlannedStrike]:
    """Plan strikes for a number of seconds, with one per `every` seconds on average.

    Each kind is used once before any kind is used again.
    """
    dice = random.Random(f"nemesis {seed}")
    strokes: list[PlannedStrike] = []
    turn: list[str] = []
    at = 0.0
    while (at := at + dice.uniform(0.5, 1.5) * every) < seconds:
        if not turn:
            turn = list(kinds)
            dice.shuffle(turn)
        strokes.append(PlannedStrike(at, turn.pop(), dice.random(), dice.uniform(*lasting)))
    return strokes


@dataclass
class Victim:
    """An instance, and the proxy in front of its Redis. `busy` is True during a strike."""

    daemon: Daemon
    proxy: FaultProxy
    busy: bool = False

    @property
    def name(self) -> str:
        return str(self.daemon.tables["daemon"]["instance"])

    def workers(self) -> tuple[int, ...]:
        """Return the pids of the instance's workers."""
        titles = self.daemon.titles()
        return tuple(pid for title, pid in titles.items() if title.startswith("streamqd: worker"))


class Nemesis:
    """Strikes when `step` is called, and logs its acts in `strikes`."""

    def __init__(
        self,
        planned: list[PlannedStrike],
        server: ProcessServer,
        victims: list[Victim],
        others: list[FaultProxy],
        steer: Connection,
    ) -> None:
        self.strikes: list[Strike] = []
        self.passed = 0  # strikes of the plan that found no target
        self._planned = planned
        self._rough = any(stroke.kind not in PEACE for stroke in planned)
        self._server = server
        self._victims = victims
        self._proxies = [*(victim.proxy for victim in victims), *others]
        self._fleet = Fleet(Store(steer, Keys()), "default", 10.0)
        self._assignments = victims[0].daemon.assignments()
        self._began = time.monotonic()
        self._courses: list[tuple[Course, Wait, float]] = []
        self.server_away = False
        self._acts: dict[str, Callable[[PlannedStrike], Course]] = {
            kind: getattr(self, f"_{kind.replace(' ', '_')}") for kind in {*FAULTS, *PEACE}
        }

    @property
    def is_over(self) -> bool:
        """True if the plan is finished and everything is healed."""
        return not self._planned and not self._courses

    def step(self) -> None:
        """Continue the running strikes, and start those that are due."""
        now = time.monotonic()
        for victim in self._victims:
            daemon = victim.daemon
            assert victim.busy or daemon.running, (
                f"the daemon exited without a strike\n{daemon.tail()}"
            )
        under_way, self._courses = self._courses, []
        for course, wait, since in under_way:
            if wait():
                self._continue(course)
            else:
                assert now - since < PATIENCE, f"it does not heal: {course.gi_code.co_name}"
                self._courses.append((course, wait, since))
        while self._planned and now - self._began >= self._planned[0].at:
            stroke = self._planned.pop(0)
            self._continue(self._acts[stroke.kind](stroke))

    def _continue(self, course: Course) -> None:
        with contextlib.suppress(StopIteration):
            self._courses.append((course, next(course), time.monotonic()))

    # --- the log, and the targets ---

    @contextmanager
    def _log_strike(self, kind: str, whom: str, pids: tuple[int, ...] = ()) -> Iterator[None]:
        """Log a strike that starts now and ends when the block ends."""
        at, now = len(self.strikes), time.monotonic()
        self.strikes.append(Strike(at, kind, whom, pids, now, float("inf")))
        yield
        self.strikes[at] = self.strikes[at]._replace(ended=time.monotonic())

    def _choose(self, stroke: PlannedStrike, *, spare: int = 0) -> Victim | None:
        """Return a working instance that no strike affects at the moment, or None.

        `spare` is the number of other such instances that must remain to do the work.
        """
        able = [each for each in self._victims if not each.busy and each.workers()]
        if len(able) <= spare:
            self.passed += 1
            return None
        return able[int(stroke.chance * len(able))]

    def _choose_worker(self, stroke: PlannedStrike) -> tuple[Victim | None, int]:
        """Return an instance from `_choose` and the pid of one of its workers, or (None, 0)."""
        victim = self._choose(stroke)
        pids = victim.workers() if victim is not None else ()
        return (victim, pids[int(stroke.chance * 997) % len(pids)]) if pids else (None, 0)

    @contextmanager
    def _mark_busy(self, victim: Victim) -> Iterator[None]:
        victim.busy = True
        yield
        victim.busy = False

    # --- processes ---

    def _kill_worker(self, stroke: PlannedStrike) -> Course:
        victim, pid = self._choose_worker(stroke)
        if victim is not None:
            with self._log_strike("kill worker", victim.name, (pid,)), _ignore_exited():
                os.kill(pid, signal.SIGKILL)
        yield from ()

    def _kill_housekeeper(self, stroke: PlannedStrike) -> Course:
        victim = self._choose(stroke)
        pid = victim and victim.daemon.titles().get("streamqd: housekeeper")
        if victim is not None and pid:
            with self._log_strike("kill housekeeper", victim.name), _ignore_exited():
                os.kill(pid, signal.SIGKILL)
        yield from ()

    def _kill_supervisor(self, stroke: PlannedStrike) -> Course:
        victim = self._choose(stroke, spare=1)
        if victim is None:
            return
        daemon = victim.daemon
        with self._mark_busy(victim):
            with self._log_strike("kill supervisor", victim.name, victim.workers()):
                daemon.kill()
            yield lambda: not daemon.session()  # F6: fails if one of its processes is left
            yield _time_after(stroke.seconds)
            yield from self._start(daemon)

    def _restart(self, stroke: PlannedStrike) -> Course:
        victim = self._choose(stroke, spare=1)
        if victim is None:
            return
        daemon = victim.daemon
        with self._mark_busy(victim), self._log_strike("restart", victim.name):
            daemon.signal(signal.SIGTERM)
            yield lambda: not daemon.running
            # 6: Redis was unavailable, so no lease could be released.
            assert daemon.wait() in ((0, 6) if self._rough else (0,)), daemon.tail()
            yield from self._start(daemon)

    def _start(self, daemon: Daemon) -> Course:
        # A daemon cannot start without its server.
        yield lambda: not self.server_away
        mark = daemon.mark()
        daemon.start()
        while not daemon.events("daemon.ready", mark):
            yield lambda: daemon.events("daemon.ready", mark) or not daemon.running
            if not daemon.running and not daemon.events("daemon.ready", mark):
                assert daemon.wait() == 4, f"it does not start\n{daemon.tail()}"
                yield lambda: not self.server_away
                daemon.start()

    def _stop_worker(self, stroke: PlannedStrike) -> Course:
        victim, pid = self._choose_worker(stroke)
        if victim is None:
            return
        with self._log_strike("stop worker", victim.name, (pid,)):
            yield from self._stop_for([pid], stroke.seconds)

    def _stop_supervisor(self, stroke: PlannedStrike) -> Course:
        victim = self._choose(stroke, spare=1)
        if victim is None:
            return
        with (
            self._mark_busy(victim),
            self._log_strike("stop supervisor", victim.name, victim.workers()),
        ):
            yield from self._stop_for([victim.daemon.pid], stroke.seconds)

    def _stop_host(self, stroke: PlannedStrike) -> Course:
        victim = self._choose(stroke, spare=1)
        if victim is None:
            return
        pids = [victim.daemon.pid, *(each.pid for each in victim.daemon.session())]
        with self._mark_busy(victim), self._log_strike("stop host", victim.name, victim.workers()):
            yield from self._stop_for(list(dict.fromkeys(pids)), stroke.seconds)

    def _stop_for(self, pids: list[int], seconds: float) -> Course:
        for pid in pids:
            with _ignore_exited():
                os.kill(pid, signal.SIGSTOP)
        yield _time_after(seconds)
        for pid in reversed(pids):
            with _ignore_exited():
                os.kill(pid, signal.SIGCONT)

    # --- connections ---

    def _cut_off(self, stroke: PlannedStrike) -> Course:
        victim = self._choose(stroke, spare=1)
        if victim is None:
            return
        with self._mark_busy(victim), self._log_strike("cut off", victim.name, victim.workers()):
            victim.proxy.refusing = True
            victim.proxy.cut()
            yield _time_after(stroke.seconds)
            victim.proxy.refusing = False

    def _drop_reply(self, stroke: PlannedStrike) -> Course:
        yield from self._arm(stroke, Fault.DROP_REPLY, Fault.CUT_REPLY)

    def _reset(self, stroke: PlannedStrike) -> Course:
        yield from self._arm(stroke, Fault.CUT_BEFORE, Fault.CUT_AFTER)

    def _half_open(self, stroke: PlannedStrike) -> Course:
        yield from self._arm(stroke, Fault.SWALLOW_REPLY)

    def _arm(self, stroke: PlannedStrike, *faults: Fault) -> Course:
        """Arm the faults for some of the next commands of one client, which may be the producer."""
        at = int(stroke.chance * len(self._proxies))
        hit = self._victims[at] if at < len(self._victims) else None
        dice = random.Random(stroke.chance)
        pids = hit.workers() if hit is not None and hit.daemon.running else ()
        with self._log_strike(stroke.kind, hit.name if hit is not None else "producer", pids):
            for _ in range(3):
                self._proxies[at].arm(dice.choice(faults), nth=dice.randrange(1, 40))
        yield from ()

    def _kill_clients(self, _stroke: PlannedStrike) -> Course:
        if not self.server_away:
            with self._log_strike("kill clients", "redis"):
                for kind in ("normal", "pubsub"):  # all clients except this one
                    self._fleet.store.execute("CLIENT", "KILL", "TYPE", kind)
        yield from ()

    # --- the server ---

    def _stop_redis(self, stroke: PlannedStrike) -> Course:
        if self.server_away:
            return
        with self._log_strike("stop redis", "redis"):
            self.server_away = True
            self._server.pause()
            yield _time_after(stroke.seconds)
            self._server.resume()
            self.server_away = False

    def _kill_redis(self, stroke: PlannedStrike) -> Course:
        if self.server_away:
            return
        with self._log_strike("kill redis", "redis"):
            self.server_away = True
            self._server.kill()
            yield _time_after(stroke.seconds / 2)
            self._server.restart()
            self.server_away = False

    def _flush_scripts(self, _stroke: PlannedStrike) -> Course:
        if not self.server_away:
            with self._log_strike("flush scripts", "redis"):
                self._fleet.store.execute("SCRIPT", "FLUSH")
        yield from ()

    # --- directives: no faults ---

    def _order(self, stroke: PlannedStrike) -> Course:
        """Move some assignments to other instances, and rebalance the fleet after a while."""
        yield lambda: not self.server_away
        dice = random.Random(stroke.chance)
        with self._log_strike("order", "fleet"):
            for assignment in dice.sample(self._assignments, max(1, len(self._assignments) // 4)):
                to = dice.choice(self._victims).name
                # Redis may be unavailable at the moment.
                with contextlib.suppress(RequestRefusedError, StreamqdError):
                    directives.move(self._fleet, assignment, to, "the nemesis wants it")
            yield _time_after(stroke.seconds)
            yield lambda: not self.server_away
            with contextlib.suppress(StreamqdError):
                directives.rebalance(self._fleet, "the nemesis wants it")

    def _reload(self, stroke: PlannedStrike) -> Course:
        victim = self._choose(stroke)
        if victim is None:
            return
        daemon = victim.daemon
        with self._log_strike("reload", victim.name):
            mark = daemon.mark()
            daemon.signal(signal.SIGHUP)
            yield (
                lambda: (
                    daemon.events("reload.finished", mark)
                    or daemon.events("reload.refused", mark)
                    or not daemon.running
                    or daemon.events("daemon.started", mark)
                )
            )


def _time_after(seconds: float) -> Wait:
    """Return a condition that becomes true after a number of seconds."""
    until = time.monotonic() + seconds
    return lambda: time.monotonic() >= until


def _ignore_exited() -> contextlib.AbstractContextManager[None]:
    """Ignore that a process has exited in the meantime."""
    return contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess)
