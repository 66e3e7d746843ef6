"""Reload: validate the configuration and the code in a child, then replace workers one by one.

If the configuration is invalid or the code cannot be imported, nothing changes.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamqd import logs, startup
from streamqd.config import Settings
from streamqd.errors import ConfigError
from streamqd.handlers import Probe
from streamqd.notify import Notifier
from streamqd.subprocess_task import SubprocessTask, TaskResult
from streamqd.supervisor.rolling_replacement import RollResult

# Settings on which the running processes depend, so that only a restart can change them.
FIXED = ("redis", "keys", "log")
FIXED_DAEMON = ("instance", "fleet", "state_dir", "preload", "lease_ttl", "weight")


@dataclass(frozen=True)
class Validated:
    """The result of validating a new configuration in a child process.

    `settings` is None if the configuration is invalid. `partitions` maps topics to their partition
    counts. `sources` lists the files of the user's code, which were read after `since_unix_ns`.
    `groups_restored` is the number of missing consumer groups that the child has created again.
    """

    settings: Settings | None
    partitions: dict[str, int]
    sources: list[str]
    since_unix_ns: int
    groups_restored: int


class Reload:
    """Validates one new configuration at a time, and reports the progress of the reload.

    It does not apply the configuration. The supervisor does that and replaces the workers.
    """

    def __init__(
        self,
        load: Callable[[], Settings] | None,
        only: frozenset[str],
        forget: Sequence[Callable[[], None]],
        notifier: Notifier,
    ) -> None:
        """Prepare for reloads, without starting one.

        `load` reads the configuration, and `only` names the consumers to run. `forget` is passed to
        `process.spawn`.
        """
        self._load = load
        self._only = only
        self._forget = forget
        self._notifier = notifier
        self._requested_unix_ms = 0  # time of the request for the next reload, 0 if there is none
        self._since_unix_ms = 0
        self._probe: SubprocessTask | None = None
        self._settings: Settings | None = None
        self.rolling = False
        self._begun_unix_ns = 0
        # The reason why the last reload was refused or stopped, or '' if it succeeded.
        self.problem = ""

    def request(self) -> None:
        """Request a reload. If one is already running, the new one starts after it."""
        self._requested_unix_ms = self._requested_unix_ms or time.time_ns() // 1_000_000

    @property
    def since_unix_ms(self) -> int:
        """The time (unix ms) at which the current reload was requested, or 0 if there is none.

        A reload that is already running takes priority over one that is only requested.
        """
        if self._probe is not None or self.rolling:
            return self._since_unix_ms
        return self._requested_unix_ms

    @property
    def idle(self) -> bool:
        """True if no reload is requested or running."""
        return not (self._requested_unix_ms or self._probe or self.rolling)

    @property
    def pids(self) -> set[int]:
        """The process ID of the child that validates a configuration, if it is running."""
        return {self._probe.pid} if self._probe is not None else set()

    def tick(self, running: Settings) -> Validated | None:
        """Start a requested reload, or return the result of a validation that has finished.

        This never blocks.
        """
        if self._probe is not None:
            found = self._probe.poll()
            if found is None:
                return None
            self._probe = None
            return self._finish_validation(found)
        if self._requested_unix_ms and not self.rolling:
            self._since_unix_ms, self._requested_unix_ms = self._requested_unix_ms, 0
            self._begin(running)
        return None

    def _begin(self, running: Settings) -> None:
        self._notifier.reloading()
        logs.event("reload.started")
        self._begun_unix_ns = time.time_ns()
        self.problem = ""
        if self._load is None:
            self.refuse(["this daemon was started without a configuration file"])
            return
        try:
            settings = self._load()
        except ConfigError as error:
            self.refuse(error.problems)
            return
        kept = self._settings = _keep_fixed(settings, running)
        only = self._only
        try:
            self._probe = SubprocessTask(
                lambda: startup.renew(kept, only),
                title="streamqd: probe",
                timeout=kept.daemon.boot_timeout,
                forget=self._forget,
            )
        except OSError as error:
            self.refuse([f"the operating system refuses another process: {error}"])

    def _finish_validation(self, found: TaskResult) -> Validated | None:
        settings = self._settings
        assert settings is not None
        if found.error:
            self.refuse([f"validating the new configuration failed: {found.error}"])
            return None
        renewal = startup.Renewal(*found.result)
        usable = None
        if renewal.problems:
            self.refuse(renewal.problems)
        else:
            probe = Probe(renewal.declared, [])
            usable = startup.complete(settings, probe, self._only).settings
        return Validated(
            usable, renewal.partitions, renewal.sources, self._begun_unix_ns, renewal.restored
        )

    def refuse(self, problems: list[str]) -> None:
        """Log why the new configuration is rejected. The old one stays in use."""
        self.problem = "; ".join(problems)
        for problem in problems:
            logs.event("reload.refused", logging.ERROR, problem=problem)
        self._notifier.ready("reload refused, the old configuration stays in use")

    def start_roll(self, partitions: int) -> None:
        """Record that the supervisor now replaces the workers of this many partitions."""
        self.rolling = True
        logs.event("reload.validated", partitions=partitions)

    def finish_roll(self, result: RollResult) -> None:
        """Report the result of replacing the workers."""
        self.rolling = False
        if result.assignment is None:
            logs.event("reload.finished")
            self._notifier.ready("reloaded")
            return
        self.problem = (
            f"the new worker of {result.assignment} does not start: {result.problem};"
            f" see its last events. {result.remaining} workers keep running the old code"
        )
        logs.event(
            "reload.stopped",
            logging.ERROR,
            assignment=result.assignment,
            workers=result.remaining,
            problem=self.problem,
        )
        self._notifier.ready("reload stopped, the old workers keep running")


def _keep_fixed(new: Settings, old: Settings) -> Settings:
    """Return the new settings, but with the old values where only a restart can change them.

    If any differ, this is logged.
    """
    changed = [f"[{name}]" for name in FIXED if getattr(new, name) != getattr(old, name)]
    fixed = {name: getattr(old.daemon, name) for name in FIXED_DAEMON}
    changed += [
        f"daemon.{name}" for name, value in fixed.items() if getattr(new.daemon, name) != value
    ]
    # At the start, the URL of an embedded server was replaced with the server's address. So this
    # difference does not mean that the configuration has changed.
    if new.redis.url == "embedded:" and changed and changed[0] == "[redis]":
        changed.pop(0)
    if changed:
        logs.event("reload.restart_required", logging.WARNING, settings=", ".join(changed))
    return dataclasses.replace(
        new,
        redis=old.redis,
        keys=old.keys,
        log=old.log,
        daemon=dataclasses.replace(new.daemon, **fixed),
    )
