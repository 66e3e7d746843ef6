"""A Flask extension that creates one `Producer` and one `Outbox` for each application."""

from __future__ import annotations

from typing import NamedTuple, Unpack

from flask import Flask, current_app

from streamqd import config
from streamqd.outbox.outbox import Outbox
from streamqd.producer import Producer
from streamqd.producer.options import ProducerOptions

_NAME = "streamqd"


class _Senders(NamedTuple):
    producer: Producer
    outbox: Outbox


class Streamqd:
    """The producer and the outbox of the current Flask application.

    `app.config["STREAMQD"]` is the path of a configuration file, or a dictionary with its sections.
    Without this key, the file in STREAMQ_CONFIG is used, or else ./streamq.toml. The keyword
    arguments are the options of `Producer`, which connects at the first send. All threads can share
    the producer and the outbox.

    `init_app` raises ConfigError if the configuration is invalid.
    """

    def __init__(self, app: Flask | None = None, **options: Unpack[ProducerOptions]) -> None:
        self._options = options
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Read the settings of an application, and create its producer and its outbox."""
        settings = config.load_given(app.config.get("STREAMQD"), "STREAMQD")
        producer = Producer(settings=settings, **self._options)
        app.extensions[_NAME] = _Senders(producer, Outbox(settings=settings))

    @property
    def producer(self) -> Producer:
        """The producer of the current application. Raises RuntimeError if there is none."""
        return self._current().producer

    @property
    def outbox(self) -> Outbox:
        """The outbox of the current application. Raises RuntimeError if there is none."""
        return self._current().outbox

    def _current(self) -> _Senders:
        found = current_app.extensions.get(_NAME)
        if not isinstance(found, _Senders):
            raise RuntimeError(
                f"{current_app.name} is not initialized for streamqd; pass it to init_app"
            )
        return found
