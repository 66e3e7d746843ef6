"""The settings of a handler under test: those of @handler, overridden by those of the test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from streamqd import config, handlers
from streamqd.config import Consumer
from streamqd.errors import ConfigError
from streamqd.handlers.options import HandlerOptions
from streamqd.model import RetryPolicy

TOPIC, GROUP = "test", "test"  # defaults for a function without @handler


class TestedOptions(HandlerOptions, total=False):
    """The settings that a test may pass: the options of `@handler`, including `retry`."""

    retry: RetryPolicy | None


def reference_of(function: Callable[..., object]) -> str:
    """Return `module:function`, the name of the handler in dead letters."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def consumer_of(
    function: Callable[..., object], topic: str | None, group: str | None, given: TestedOptions
) -> Consumer:
    """Return the settings of a handler. `given` overrides @handler, as the configuration file does.

    Among several declarations for `topic` and `group`, where None matches all, the latest wins.
    Raises ConfigError with every problem.
    """
    reference = reference_of(function)
    raw: dict[str, Any] = {"topic": topic or TOPIC, "group": group or GROUP}
    for each in handlers.declared:
        fits = topic in (None, each["topic"]) and group in (None, each["group"])
        if each["handler"] == reference and fits:
            raw = dict(each)
    options = {name: value for name, value in given.items() if name != "retry"}
    raw |= handlers.plain_options(given.get("retry"), options)
    if raw.get("source") == "dlq":
        raise ConfigError(["source: a handler of dead letters is tested with `streamqd_daemon`"])
    # The name of a nested function is not valid in a configuration file.
    raw["handler"] = "tested:handler"
    [consumer] = config.declare_consumers(config.load(None, environ={}), [raw]).consumers
    return replace(consumer, handler=reference)


def prepare_handler(
    consumer: Consumer, function: Callable[..., object], module: Any
) -> handlers.Loaded:
    """Return the handler, ready for messages. Raises HandlerLoadError or ConfigError."""
    loaded = handlers.prepare(function, consumer.handler, module, consumer.codec)
    if problems := handlers.misfits([consumer], {consumer.handler: loaded.form.traits}):
        raise ConfigError([each.partition(").")[2] for each in problems])
    return loaded
