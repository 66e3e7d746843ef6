"""The settings of a handler under test: its @handler options, which the test's options override."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from streamqd import config, handlers
from streamqd.config import Consumer
from streamqd.errors import ConfigError
from streamqd.handlers.options import HandlerOptions
from streamqd.model import RetryPolicy

TOPIC, GROUP = "test", "test"  # used for a function without @handler


class TestedOptions(HandlerOptions, total=False):
    """The settings that a test may pass: the options of `@handler`, including `retry`."""

    retry: RetryPolicy | None


def handler_reference(function: Callable[..., object]) -> str:
    """Return `module:function`, by which dead letters name the handler."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def handler_consumer(
    function: Callable[..., object], topic: str | None, group: str | None, given: TestedOptions
) -> Consumer:
    """Return the settings of a handler.

    The options in `given` override those of @handler, as a configuration file does. If there are
    several declarations for `topic` and `group` (None matches all), the last one is used. Raises
    ConfigError with all problems.
    """
    reference = handler_reference(function)
    raw: dict[str, Any] = {"topic": topic or TOPIC, "group": group or GROUP}
    for each in handlers.declared:
        fits = topic in (None, each["topic"]) and group in (None, each["group"])
        if each["handler"] == reference and fits:
            raw = dict(each)
    options = {name: value for name, value in given.items() if name != "retry"}
    raw |= handlers.plain_options(given.get("retry"), options)
    if raw.get("source") == "dlq":
        raise ConfigError(["source: a handler of dead letters is tested with `streamqd_daemon`"])
    # A nested function has a name that is not valid in a configuration file, so the settings are
    # checked with another name.
    raw["handler"] = "tested:handler"
    [consumer] = config.declare_consumers(config.load(None, environ={}), [raw]).consumers
    return replace(consumer, handler=reference)


def prepare_handler(
    consumer: Consumer, function: Callable[..., object], module: Any
) -> handlers.Loaded:
    """Return a handler that is ready for messages. Raises HandlerLoadError or ConfigError."""
    loaded = handlers.prepare(function, consumer.handler, module, consumer.codec)
    if problems := handlers.find_mismatches(
        [consumer], {consumer.handler: loaded.signature.traits}
    ):
        raise ConfigError([each.partition(").")[2] for each in problems])
    return loaded
