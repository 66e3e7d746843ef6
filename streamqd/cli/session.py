"""One invocation of `streamqd`: its configuration and its connection to Redis."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streamqd import config
from streamqd.config.topology import EMBEDDED
from streamqd.errors import RedisRefused, RedisUnavailable
from streamqd.store.client import Connection, connect
from streamqd.store.keys import Keys
from streamqd.store.store import Store

if TYPE_CHECKING:
    from streamqd.admin.published import Fleet

TIMEOUT = 5.0  # seconds that one exchange of a command with Redis may take
NOT_AUDITED = "the audit trail could not be written: this is not in it"


@dataclass
class Session:
    """Filled in by the global options; what is read from it is read on first use."""

    config_path: Path | None = None
    overrides: dict[str, str] = field(default_factory=dict)
    verbose: bool = False
    quiet: bool = False
    color: bool | None = None  # what --color or --no-color says
    is_daemon: bool = False  # the daemon runs, not a command
    timeout: float | None = None  # seconds that one exchange with Redis may take; None: TIMEOUT
    _settings: config.Settings | None = None
    _link: Connection | None = None

    def load(self) -> config.Settings:
        """Read the configuration again. Raises ConfigError."""
        return config.load(self.config_path, self.overrides)

    @property
    def settings(self) -> config.Settings:
        """The configuration. Raises ConfigError."""
        if self._settings is None:
            self._settings = self.load()
        return self._settings

    @property
    def keys(self) -> Keys:
        """The names of the keys in Redis."""
        return Keys(self.settings.keys.control, self.settings.keys.streams)

    @property
    def link(self) -> Connection:
        """The connection to Redis, made on first use. Raises ConfigError."""
        if self._link is None:
            redis = config.resolved(self.settings).redis
            self._link = connect(redis, timeout=self.timeout or TIMEOUT, name="streamqd:cli")
        return self._link

    @property
    def store(self) -> Store:
        """The connection with the names of the keys. Raises ConfigError."""
        return Store(self.link, self.keys)

    @contextlib.contextmanager
    def using_redis(self) -> Iterator[None]:
        """Explain errors of the connection, and close it at the end."""
        try:
            yield
        except RedisUnavailable as error:
            raise self.explained(error) from error
        finally:
            link, self._link = self._link, None
            if link is not None:
                link.close()

    @property
    def fleet(self) -> Fleet:
        """The fleet that the configuration names."""
        from streamqd.admin.published import Fleet

        daemon = self.settings.daemon
        return Fleet(self.store, daemon.fleet, daemon.lease_ttl)

    def record(
        self, topic: str, command: str, what: dict[str, Any], counts: dict[str, int]
    ) -> None:
        """Write into the audit trail of a topic what was done; note it when that fails."""
        from streamqd.admin import audit

        try:
            audit.record(self.store, topic, command, what=what, counts=counts)
        except (RedisUnavailable, RedisRefused):
            self.note(NOT_AUDITED)

    def explained(self, error: RedisUnavailable) -> RedisUnavailable:
        """The error in words for people: what it means that Redis does not answer."""
        if timed_out(error):
            # A server is there: it is stopped, overloaded, or waits for its disk.
            return RedisUnavailable(f"Redis does not answer: {error}", sent=error.sent)
        if error.sent or not self.embedded:
            return error
        if refused := self.forbidden(error):
            return RedisUnavailable(refused, sent=False)
        if self.config_path is None:
            text = (
                "no streamqd is running with the default settings; pass its configuration with"
                " --config FILE"
            )
        else:
            text = (
                f"no streamqd is running with {self.config_path}; start it with `streamqd --config"
                f" {self.config_path}`"
            )
        return RedisUnavailable(text, sent=False)

    def forbidden(self, error: BaseException) -> str:
        """Return a sentence when this user may not open the daemon's socket, else ''."""
        folder = self.settings.daemon.state_dir.absolute()
        denied = _caused_by(error, PermissionError)
        if not denied and os.access(folder, os.X_OK, effective_ids=True):
            return ""
        try:
            there = folder.stat()
        except PermissionError:
            return f"daemon.state_dir: no permission to look into {folder}; use the daemon's user"
        except OSError:
            return ""  # nothing was ever started there
        try:
            name = pwd.getpwuid(there.st_uid).pw_name
        except KeyError:
            name = str(there.st_uid)
        return (
            f"daemon.state_dir: no permission to open the server's socket in {folder}, which"
            f" belongs to {name}; run the command as {name}, such as `sudo -u {name} streamqd …`"
        )

    @property
    def embedded(self) -> bool:
        """Whether Redis is the daemon's own server."""
        return self.settings.redis.url == EMBEDDED

    @property
    def coloured(self) -> bool:
        """Whether a terminal gets colours: by the option, else by NO_COLOR and TERM."""
        if self.color is not None:
            return self.color
        return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def note(self, text: str) -> None:
        """Print something beside the result on standard error; nothing with --quiet."""
        if not self.quiet:
            click.echo(text, err=True)

    def more(self, cursor: str) -> None:
        """Say how to see the next page; nothing after the last one."""
        if cursor:
            self.note(f"more: --cursor {cursor}")


def _caused_by(error: BaseException | None, kind: type[BaseException]) -> bool:
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error is not None


def timed_out(error: BaseException | None) -> bool:
    """Whether the server did not answer in time, and nothing refused the connection."""
    while error is not None:
        # A unix socket whose queue is full says BlockingIOError: its server accepts no connections.
        if isinstance(error, TimeoutError | BlockingIOError):
            return True
        error = error.__cause__ or error.__context__
    return False


pass_session = click.make_pass_decorator(Session, ensure=True)
