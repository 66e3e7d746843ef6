"""An `AsyncProducer` in Starlette, with one producer for each server process.

The producer exists while the server is running. `streamqd.fastapi` adds a dependency for FastAPI.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Unpack

from starlette.requests import HTTPConnection

from streamqd import config
from streamqd.producer.asynchronous import AsyncProducer
from streamqd.producer.options import ProducerOptions

__all__ = ["Lifespan", "producer_lifespan", "producer_of"]

Lifespan = Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any]]]

_STATE = "streamqd_producer"


def producer_lifespan(
    given: str | Path | Mapping[str, Any] | None = None, **options: Unpack[ProducerOptions]
) -> Lifespan:
    """Return a lifespan for `Starlette(lifespan=...)` that opens and closes an AsyncProducer.

    `given` is the path of a configuration file, or a dictionary with its sections. If it is None,
    the file in STREAMQ_CONFIG is used, or else ./streamq.toml. The keyword arguments are the
    options of `Producer`. Before the server stops, all messages that were sent are written. If your
    application has a lifespan of its own, enter this one inside it, and yield its state.

    If the configuration is invalid, the lifespan raises ConfigError, and the server does not start.
    If Redis is unavailable, the server starts anyway.
    """

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[Mapping[str, Any]]:
        settings = config.load_given(given, "producer_lifespan")
        async with AsyncProducer(settings=settings, **options) as producer:
            yield {_STATE: producer}

    return lifespan


def producer_of(connection: HTTPConnection) -> AsyncProducer:
    """Return the producer of the application that is serving a request or a WebSocket.

    Raises RuntimeError if the application has no `producer_lifespan`.
    """
    producer = getattr(connection.state, _STATE, None)
    if not isinstance(producer, AsyncProducer):
        raise RuntimeError(
            "the application has no producer; pass lifespan=producer_lifespan() to it, or yield the"
            " state of producer_lifespan in its own lifespan"
        )
    return producer
