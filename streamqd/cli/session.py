"""The state of one invocation of `streamqd`: options, configuration, and connection to Redis."""

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
from streamqd.errors import RedisResponseError, RedisUnavailableError
from streamqd.store.client import Connection, connect
from streamqd.store.keys import Keys
from streamqd.store.store import Store

if TYPE_CHECKING:
    from streamqd.admin.published import Fleet

TIMEOUT = 5.0  # seconds after which a round trip to Redis times out
NOT_AUDITED = "the audit log could not be written, so it does not contain this command"


@dataclass
class Session:
    """The state of one invocation of `streamqd`.

    It holds the global options. The configuration and the connection are created when they are
    first used.
    """

    config_path: Path | None = None
    overrides: dict[str, str] = field(default_factory=dict)
    verbose: bool = False
    quiet: bool = False
    color: bool | None = None  # value of --color or --no-color, or None if neither was passed
    is_daemon: bool = False  # True for the daemon, False for a command
    timeout: float | None = None  # seconds per round trip to Redis, or None to use TIMEOUT
    _settings: config.Settings | None = None
    _link: Connection | None = None

    def load(self) -> config.Settings:
        """Read the configuration again. Raises ConfigError."""
        return config.load(self.config_path, self.overrides)

    @property
    def settings(self) -> config.Settings:
        """The configuration, loaded at first use. Raises ConfigError."""
        if self._settings is None:
            self._settings = self.load()
        return self._settings

    @property
    def keys(self) -> Keys:
        """The names of the keys in Redis."""
        return Keys(self.settings.keys.control, self.settings.keys.streams)

    @property
    def link(self) -> Connection:
        """The connection to Redis, created at first use. Raises ConfigError."""
        if self._link is None:
            redis = config.resolve_url(self.settings).redis
            self._link = connect(redis, timeout=self.timeout or TIMEOUT, name="streamqd:cli")
        return self._link

    @property
    def store(self) -> Store:
        """The connection to Redis together with the names of the keys. Raises ConfigError."""
        return Store(self.link, self.keys)

    @contextlib.contextmanager
    def using_redis(self) -> Iterator[None]:
        """Close the connection after the block, and add a cause and a remedy to its errors."""
        try:
            yield
        except RedisUnavailableError as error:
            raise self.explain(error) from error
        finally:
            link, self._link = self._link, None
            if link is not None:
                link.close()

    @property
    def fleet(self) -> Fleet:
        """The fleet from the configuration."""
        from streamqd.admin.published import Fleet

        daemon = self.settings.daemon
        return Fleet(self.store, daemon.fleet, daemon.lease_ttl)

    def record(
        self, topic: str, command: str, what: dict[str, Any], counts: dict[str, int]
    ) -> None:
        """Record a command, with its arguments and counts, in the audit log of a topic.

        If the entry cannot be written, only a note is printed.
        """
        from streamqd.admin import audit

        try:
            audit.record(self.store, topic, command, arguments=what, counts=counts)
        except (RedisUnavailableError, RedisResponseError):
            self.note(NOT_AUDITED)

    def explain(self, error: RedisUnavailableError) -> RedisUnavailableError:
        """Return an error that adds the cause and a remedy for the operator, if they are known."""
        if is_timeout(error):
            # The server exists, but it is stopped, overloaded, or waiting for its disk.
            return RedisUnavailableError(f"Redis does not answer: {error}", sent=error.sent)
        if error.sent or not self.embedded:
            return error
        if refused := self.explain_forbidden(error):
            return RedisUnavailableError(refused, sent=False)
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
        return RedisUnavailableError(text, sent=False)

    def explain_forbidden(self, error: BaseException) -> str:
        """Return an explanation if this user may not open the daemon's socket, or '' otherwise."""
        folder = self.settings.daemon.state_dir.absolute()
        denied = _is_caused_by(error, PermissionError)
        if not denied and os.access(folder, os.X_OK, effective_ids=True):
            return ""
        try:
            found = folder.stat()
        except PermissionError:
            return f"daemon.state_dir: no permission to look into {folder}; use the daemon's user"
        except OSError:
            return ""  # no daemon was ever started with this directory
        try:
            name = pwd.getpwuid(found.st_uid).pw_name
        except KeyError:
            name = str(found.st_uid)
        return (
            f"daemon.state_dir: no permission to open the server's socket in {folder}, which"
            f" belongs to {name}; run the command as {name}, such as `sudo -u {name} streamqd …`"
        )

    @property
    def embedded(self) -> bool:
        """True if Redis is the embedded server of the daemon."""
        return self.settings.redis.url == EMBEDDED

    @property
    def colored(self) -> bool:
        """True if output on a terminal is colored.

        --color and --no-color take precedence over the environment variables NO_COLOR and TERM.
        """
        if self.color is not None:
            return self.color
        return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def note(self, text: str) -> None:
        """Print a note on standard error, unless --quiet is set."""
        if not self.quiet:
            click.echo(text, err=True)

    def print_next_page(self, cursor: str) -> None:
        """Print the option that shows the next page, or nothing if `cursor` is ''."""
        if cursor:
            self.note(f"more: --cursor {cursor}")


def _is_caused_by(error: BaseException | None, kind: type[BaseException]) -> bool:
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error is not None


def is_timeout(error: BaseException | None) -> bool:
    """Return True if the server did not reply in time, and False if it refused the connection."""
    while error is not None:
        # A Unix socket raises BlockingIOError if its queue is full because the server does not
        # accept connections.
        if isinstance(error, TimeoutError | BlockingIOError):
            return True
        error = error.__cause__ or error.__context__
    return False


pass_session = click.make_pass_decorator(Session, ensure=True)
