"""What one invocation of the command shares: its configuration and its connection to Redis."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click
import redis

from streamqd import config
from streamqd.config.endpoint import EMBEDDED
from streamqd.errors import RedisUnavailable
from streamqd.store.client import Connection
from streamqd.store.cluster import connect
from streamqd.store.keys import Keys

TIMEOUT = 5.0  # seconds that one exchange of a verb with Redis may take


@dataclass
class Session:
    """Filled in by the global options; what is read from it is read on first use."""

    config_path: Path | None = None
    overrides: dict[str, str] = field(default_factory=dict)
    verbose: bool = False
    quiet: bool = False
    color: bool | None = None  # what --color or --no-color says
    _settings: config.Settings | None = None

    def load(self) -> config.Settings:
        """Read the configuration, anew. Raises ConfigError."""
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

    @contextlib.contextmanager
    def link(self, timeout: float = TIMEOUT) -> Iterator[Connection]:
        """Lend a connection to Redis. Raises RedisUnavailable with a sentence for people."""
        link: Connection | None = None
        try:
            redis = config.resolved(self.settings).redis
            link = connect(redis, timeout=timeout, name="streamqd:cli")
            yield link
        except RedisUnavailable as error:
            raise self.explained(error) from error
        finally:
            if link is not None:
                link.close()

    def explained(self, error: RedisUnavailable) -> RedisUnavailable:
        """Say what it means that Redis does not answer."""
        if timed_out(error):
            # Somebody listens: a server that is stopped, overloaded, or waits for its disk.
            return RedisUnavailable(f"Redis does not answer: {error}", sent=error.sent)
        if error.sent or not self.embedded:
            return error
        if self.config_path is None:
            text = (
                "no streamqd is running with the default settings; name its configuration with"
                " --config FILE"
            )
        else:
            text = (
                f"no streamqd is running with {self.config_path}; start it with `streamqd --config"
                f" {self.config_path}`"
            )
        return RedisUnavailable(text, sent=False)

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
        """Say something beside the result, unless told to be quiet."""
        if not self.quiet:
            click.echo(text, err=True)


def timed_out(error: BaseException | None) -> bool:
    """Whether it was waited for in vain, and nobody said that nobody is there."""
    while error is not None:
        # A unix socket whose queue is full says BlockingIOError: nobody takes connections from it.
        if isinstance(error, TimeoutError | redis.TimeoutError | BlockingIOError):
            return True
        error = error.__cause__ or error.__context__
    return False


pass_session = click.make_pass_decorator(Session, ensure=True)
