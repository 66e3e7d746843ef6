"""The settings under which a handler is tested: what @handler declares, and what the test says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from streamqd import config, handlers
from streamqd.config import Consumer
from streamqd.errors import ConfigError
from streamqd.handlers.options import HandlerOptions
from streamqd.model import RetryPolicy

TOPIC, GROUP = "test", "test"  # of a function that nothing declares


class TestedOptions(HandlerOptions, total=False):
    """The settings that a test may give: the options of `@handler`."""

    retry: RetryPolicy | None


def reference_of(function: Callable[..., object]) -> str:
    """`module:function`, as dead letters name the handler."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def consumer_of(
    function: Callable[..., object], topic: str | None, group: str | None, given: TestedOptions
) -> Consumer:
    """The settings of a handler. `given` wins over @handler, as the configuration file does.

    Of several declarations the one counts that was made last, among those of the topic and group
    that are asked for. Raises ConfigError with every problem.
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
    # A function within another has a name that no configuration file could give.
    raw["handler"] = "tested:handler"
    [consumer] = config.declare_consumers(config.load(None, environ={}), [raw]).consumers
    return replace(consumer, handler=reference)


def fitted(consumer: Consumer, function: Callable[..., object], module: Any) -> handlers.Loaded:
    """The handler, ready to be called with a message. Raises HandlerLoadError, ConfigError."""
    loaded = handlers.prepared(function, consumer.handler, module, consumer.codec)
    if problems := handlers.misfits([consumer], {consumer.handler: loaded.form.traits}):
        raise ConfigError([each.partition(").")[2] for each in problems])
    return loaded
