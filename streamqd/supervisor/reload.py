"""SIGHUP: validate the new configuration and code in a child, then roll one partition at a time.

A configuration that cannot be used, or code that does not import, changes nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from streamqd import logs, startup
from streamqd.config import Settings
from streamqd.errors import ConfigError
from streamqd.handlers import Probe
from streamqd.model import Unit
from streamqd.subprocess_task import SubprocessTask, TaskResult

if TYPE_CHECKING:
    from streamqd.supervisor.supervisor import Supervisor

# What the running processes were built on; a change of these needs a restart.
FIXED = ("redis", "keys", "log")
FIXED_DAEMON = ("instance", "fleet", "state_dir", "preload", "lease_ttl", "weight")


class Reload:
    """One reload at a time: probe, adopt, roll."""

    def __init__(self, supervisor: Supervisor, load: Callable[[], Settings] | None) -> None:
        self._supervisor = supervisor
        self._load = load
        self._requested = False
        self._probe: SubprocessTask | None = None
        self._settings: Settings | None = None
        self._queue: list[Unit] = []
        self._rolling: Unit | None = None
        self._begun_unix_ns = 0
        self.problem = ""  # why the last reload was refused, '' when it was not

    def request(self) -> None:
        """Ask for a reload; a second request during one is done after it."""
        self._requested = True

    @property
    def idle(self) -> bool:
        """Whether no reload is asked for or under way."""
        return not (self._requested or self._probe or self._queue or self._rolling)

    @property
    def pids(self) -> set[int]:
        """Process ids that belong to a reload under way."""
        return {self._probe.pid} if self._probe is not None else set()

    def tick(self) -> None:
        """Go on with what is under way. Never blocks."""
        if self._supervisor.drain.begun:
            return
        if self._probe is not None:
            found = self._probe.poll()
            if found is not None:
                self._probe = None
                self._validated(found)
        elif self._queue or self._rolling:
            self._roll()
        elif self._requested:
            self._requested = False
            self._begin()

    def _begin(self) -> None:
        self._supervisor.notifier.reloading()
        logs.event("reload.begun")
        self._begun_unix_ns = time.time_ns()
        self.problem = ""
        if self._load is None:
            self._refused(["this daemon was started without a configuration file"])
            return
        try:
            settings = self._load()
        except ConfigError as error:
            self._refused(error.problems)
            return
        kept = self._settings = self._keep_fixed(settings)
        only = self._supervisor.only
        try:
            self._probe = SubprocessTask(
                lambda: startup.renew(kept, only),
                title="streamqd: probe",
                timeout=kept.daemon.boot_timeout,
                forget=self._supervisor.crew.forget,
            )
        except OSError as error:
            self._refused([f"the system refuses another process: {error}"])

    def _keep_fixed(self, new: Settings) -> Settings:
        old = self._supervisor.settings
        changed = [f"[{name}]" for name in FIXED if getattr(new, name) != getattr(old, name)]
        fixed = {name: getattr(old.daemon, name) for name in FIXED_DAEMON}
        changed += [
            f"daemon.{name}" for name, value in fixed.items() if getattr(new.daemon, name) != value
        ]
        # The address of an embedded server was resolved at start.
        if new.redis.url == "embedded:" and changed and changed[0] == "[redis]":
            changed.pop(0)
        if changed:
            logs.event("reload.needs_restart", logging.WARNING, settings=", ".join(changed))
        return dataclasses.replace(
            new,
            redis=old.redis,
            keys=old.keys,
            log=old.log,
            daemon=dataclasses.replace(new.daemon, **fixed),
        )

    def _validated(self, found: TaskResult) -> None:
        supervisor, settings = self._supervisor, self._settings
        assert settings is not None
        if found.trouble:
            self._refused([f"validating the new configuration failed: {found.trouble}"])
            return
        renewal = startup.Renewal(*found.result)
        supervisor.board.add("groups_restored", renewal.restored)
        if supervisor.watcher is not None:
            supervisor.watcher.watch(renewal.sources, self._begun_unix_ns)
        if renewal.problems:
            self._refused(renewal.problems)
            return
        probe = Probe(renewal.declared, [])
        settings = startup.complete(settings, probe, supervisor.only).settings
        if not supervisor.fits(settings, renewal.partitions):
            # A unit keeps its slot for the supervisor's life, also when it is not wanted any more.
            self._refused(["no slot is left for the new partitions; restart the daemon"])
            return
        supervisor.adopt(settings, renewal.partitions)
        supervisor.crew.replace_housekeeper(time.monotonic())
        self._queue = [unit for unit, one in supervisor.holdings.items() if one.child is not None]
        logs.event("reload.rolling", partitions=len(self._queue))

    def _refused(self, problems: list[str]) -> None:
        self.problem = "; ".join(problems)
        for problem in problems:
            logs.event("reload.refused", logging.ERROR, problem=problem)
        self._supervisor.notifier.ready("reload refused, the old configuration goes on")

    def _abandoned(self, unit: Unit, why: str) -> None:
        """Stop rolling: what does not start in one partition need not be tried in all."""
        left, self._queue = len(self._queue) + 1, []
        self.problem = (
            f"the new worker of {unit} does not start: {why}, its last events say why; {left}"
            " workers go on with the code that they have"
        )
        logs.event("reload.stopped", logging.ERROR, unit=unit, workers=left, problem=self.problem)
        self._supervisor.notifier.ready("reload stopped, the old workers go on")

    def _roll(self) -> None:
        """Replace one worker; go on when its successor works."""
        supervisor = self._supervisor
        if self._rolling is not None:
            holding = supervisor.holdings[self._rolling]
            # A worker that lives for few messages may be wanted replaced again at once.
            if supervisor.succession.wants(holding, "reload"):
                return
            self._rolling = None
            why = supervisor.succession.failed.get(holding.slot.index)
            if why is not None:
                self._abandoned(holding.unit, why)
                return
        while self._queue:
            unit = self._queue.pop(0)
            if supervisor.holdings[unit].child is not None:
                supervisor.succession.request(supervisor.holdings[unit], "reload")
                self._rolling = unit
                return
        logs.event("reload.done")
        supervisor.notifier.ready("reloaded")
