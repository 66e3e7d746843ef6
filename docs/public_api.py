"""The page of the Python API: every public name with its signature and its docstring."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Literal, get_args, get_origin

import streamqd
from streamqd import testing
from streamqd.errors import StreamqdError

_KINDS = ("Handlers", "Messages", "Producers", "Errors", "Other")


def parts() -> Iterator[str]:
    """The parts of the page, in order."""
    public = {name: getattr(streamqd, name) for name in sorted(streamqd.__all__)}
    for kind in _KINDS:
        names = [name for name, thing in public.items() if _kind(thing) == kind]
        if names:
            yield f"## {kind}"
        for name in names:
            yield from _described(name, public[name])
    yield "## Tests"
    yield (
        "Import these names from `streamqd.testing`. See"
        " [Test a handler](../how-to/test-a-handler.md)."
    )
    for name in testing.__all__:
        yield from _described(name, getattr(testing, name))


def _kind(thing: Any) -> str:
    if inspect.isclass(thing) and issubclass(thing, StreamqdError):
        return "Errors"
    home = getattr(thing, "__module__", "")
    parts = {"handlers": "Handlers", "producer": "Producers", "model": "Handlers"}
    for part, kind in parts.items():
        if home.startswith(f"streamqd.{part}"):
            return kind
    return "Messages" if home in ("streamqd.message", "streamqd.dead_letter") else "Other"


def _described(name: str, thing: Any) -> Iterator[str]:
    yield f"### {name}"
    if get_origin(thing) is Literal:
        yield f"One of {', '.join(f'`{word}`' for word in get_args(thing))}."
        return
    if not callable(thing):
        yield f"`{thing!r}`" if name != "__version__" else "The version string."
        return
    yield f"```text\n{_signature(name, thing)}\n```"
    yield _prose(thing)
    if inspect.isclass(thing):
        yield from _members(name, thing)


def _members(name: str, owner: type) -> Iterator[str]:
    rows = []
    for member, found in sorted(vars(owner).items()):
        if member.startswith("_"):
            continue
        plain = inspect.unwrap(found.__func__ if isinstance(found, classmethod) else found)
        if isinstance(found, property | cached_property):
            rows.append(f"- `{member}`: {_line(found)}")
        elif inspect.isfunction(plain):
            rows.append(f"- `{_signature(member, plain)}`: {_line(plain)}")
    if rows:
        yield f"Members of `{name}`:\n\n" + "\n".join(rows)


def _signature(name: str, thing: Any) -> str:
    if isinstance(thing, enum.EnumMeta):
        return "\n".join(f"{name}.{member}" for member in thing.__members__)
    try:
        signature = inspect.signature(thing)
    except ValueError:
        return name
    kept = [each for each in signature.parameters.values() if each.name not in ("self", "cls")]
    # Annotations are strings. Defaults that are strings keep their quotes.
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(signature.replace(parameters=kept)))
    text = re.sub(r"ForwardRef\('([^']*)'\)", r"\1", text).replace("'", '"')
    prefix = "async " if inspect.iscoroutinefunction(thing) else ""
    # Defaults that are sentinels or functions print as addresses, which differ from run to run.
    return f"{prefix}{name}{re.sub(r'<[^<>]* at 0x[0-9a-f]+>', '...', text)}"


def _prose(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "")


def _line(thing: Any) -> str:
    return " ".join(_prose(thing).split())
