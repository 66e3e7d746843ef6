"""The options of @handler are the same as those of a consumer, even for a strict type checker."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from streamqd.config import Consumer
from streamqd.config.consumers import Breaker, FloodGuard
from streamqd.config.setting import Kind, section_settings
from streamqd.handlers.options import (
    BackoffOptions,
    BreakerOptions,
    FloodGuardOptions,
    HandlerOptions,
)
from streamqd.model import Backoff
from tests.support.type_checker import lines_with_errors

TABLES = {"backoff": BackoffOptions, "breaker": BreakerOptions, "flood_guard": FloodGuardOptions}
BY_DECORATION = {"topic", "group", "handler"}  # arguments of the decorator itself
OF_KIND = {
    Kind.INTEGER: {int},
    Kind.NUMBER: {float},
    Kind.DURATION: {float, str, timedelta},
    Kind.SIZE: {int, str},
    Kind.TEXTS: {tuple, list, set, frozenset},
}


def members(annotation: Any) -> set[Any]:
    """Return the types in a union, without None and without the arguments of the types."""
    parts = get_args(annotation) if get_origin(annotation) is not Literal else ()
    found = {get_origin(each) or each for each in parts or (annotation,)}
    return found - {type(None)}


SECTIONS = [
    (Consumer, HandlerOptions),
    (Backoff, BackoffOptions),
    (Breaker, BreakerOptions),
    (FloodGuard, FloodGuardOptions),
]


@pytest.mark.parametrize(("section", "options"), SECTIONS)
def test_every_consumer_setting_is_a_handler_option(section: type, options: type):
    assert options.__annotations__.keys() == section_settings(section).keys() - BY_DECORATION


@pytest.mark.parametrize(("section", "options"), SECTIONS)
def test_handler_option_accepts_the_values_of_its_setting(section: type, options: type):
    hints = get_type_hints(options)
    for name in options.__annotations__:
        found, setting = hints[name], section_settings(section)[name]
        literals = [each for each in (found, *get_args(found)) if get_origin(each) is Literal]
        if setting.choices:
            assert set(get_args(literals[0])) == set(setting.choices), name
        elif setting.kind is Kind.TABLE:
            assert TABLES[name] in members(found)
        else:
            assert members(found) == OF_KIND.get(setting.kind, {str}), name


GOOD = """
from __future__ import annotations

from datetime import timedelta

from streamqd import Backoff, Message, RetryPolicy, handler


class Down(Exception):
    pass


@handler(
    topic="a", group="g", retry=RetryPolicy(max_attempts=3), timeout="30s", hard_timeout=60,
    max_age=timedelta(hours=1), prefetch_bytes="4MiB", max_rss=1 << 30, retry_on=(Down, "OSError"),
    dead_on=[KeyError, "x.Y"], breaker={"failures": 3, "on": [Down], "window": "30s"},
    backoff=Backoff(kind="fixed"), flood_guard={"dead_letters": 5, "share": 0.5},
    on_error="hold-key", concurrency=4, order="key", rate="5/m", codec="msgpack",
    start="latest", batch=None,
)
def one(msg: Message) -> None: ...


@handler(topic="a", group="h", source="dlq", backoff={"kind": "linear", "base": "2s"})
async def two(msg: Message) -> None: ...
"""

WRONG = """
from streamqd import handler

handler(topic="a", group="g", max_atempts=5)
handler(topic="a", group="g", max_attempts="many")
handler(topic="a", group="g", timeout=object())
handler(topic="a", group="g", retry_on=(lambda: 1,))
handler(topic="a", group="g", retry_on="OSError")
handler(topic="a", group="g", on_error="hold")
handler(topic="a", group="g", breaker={"failure": 3})
handler(topic="a", group="g", backoff={"kind": "square"})
handler(topic="a", group="g", handler="m:f")
handler(topic="a", group="g", prefetch_bytes=1.5)
"""


@pytest.mark.slow
def test_type_checker_finds_only_wrong_handler_options(tmp_path):
    errors = lines_with_errors(tmp_path, {"good.py": GOOD, "wrong.py": WRONG})
    assert errors == {"wrong.py": set(range(4, 14))}
