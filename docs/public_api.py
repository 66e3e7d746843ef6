"""Render the page of the Python API: every public name with its signature and its docstring."""

from __future__ import annotations

import ast
import enum
import inspect
import itertools
import re
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import streamqd
from streamqd import testing
from streamqd.errors import StreamqdError

_COLUMNS = 90  # width up to which a signature stays on one line
_KINDS = {
    "Handlers": """
Declare a function as a handler with [`handler`](#handler). When it returns, its message is
acknowledged, unless it returns another [`Result`](#result), or raises one of the exceptions in this
section. The remaining classes configure retries and hooks.
""",
    "Messages": """
A handler receives a [`Message`](#message), and a handler of dead letters also the details of the
failure, as `Message.dead_letter`.
""",
    "Producers": """
All producers have the same arguments of `send`. They differ in the time at which a message is
written: `Producer.send` returns after the write, `AsyncProducer.send` does the same without
blocking the event loop, and `BufferedProducer.send` returns immediately, because a thread writes
the message.
""",
    "Errors": """
These are the errors that applications need most often. [Errors](errors.md) lists all of them.
""",
    "Other": "",
}


def parts() -> Iterator[str]:
    """Yield the parts of the page, in order."""
    public = {name: getattr(streamqd, name) for name in sorted(streamqd.__all__)}
    for kind, about in _KINDS.items():
        names = [name for name, thing in public.items() if _kind(thing) == kind]
        yield f"## {kind}"
        if about:
            yield about.strip()
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
        words = ", ".join(f"`{word}`" for word in get_args(thing))
        yield f"The type of [`Run.verdict`](#run), which explains the values: {words}."
        return
    if not callable(thing):
        yield f"`{thing!r}`" if name != "__version__" else "The version of streamqd, as a string."
        return
    yield f"```text\n{_signature(name, thing)}\n```"
    yield _prose(thing)
    if inspect.isclass(thing):
        yield from _members(name, thing)


def _members(name: str, owner: type) -> Iterator[str]:
    attributes = [_attribute(field, text) for field, text in _field_docs(owner)]
    methods = []
    for member, found in sorted(vars(owner).items()):
        if member.startswith("_"):
            continue
        plain = inspect.unwrap(found.__func__ if isinstance(found, classmethod) else found)
        if isinstance(found, property | cached_property):
            attributes.append(_attribute(member, _line(found)))
        elif inspect.isfunction(plain):
            heading = f"#### {name}.{member}"
            methods += [heading, f"```text\n{_signature(member, plain)}\n```", _prose(plain)]
    if attributes:
        yield "Attributes:\n\n" + "\n".join(attributes)
    yield from methods


def _attribute(name: str, text: str) -> str:
    lead, values = split_values(text)
    return "\n".join([f"- `{name}`: {lead}", *values])


def split_values(text: str) -> tuple[str, list[str]]:
    """Return the first part of a text, and a subitem for each `VALUE: meaning` that follows.

    A text with fewer than two values is returned as it is, without subitems.
    """
    lead, *values = re.split(r"(?:^|(?<=[.:] ))`?((?<=`)[^`]+(?=`)|[\w-]+)`?: ", text)
    if len(values) < 4:  # two values and their meanings
        return text, []
    pairs = zip(values[::2], values[1::2], strict=True)
    return lead.strip(), [f"    - `{value}`: {meaning.strip()}" for value, meaning in pairs]


def _field_docs(owner: type) -> Iterator[tuple[str, str]]:
    """Yield each field that is followed by a docstring, with that docstring on one line."""
    for field, after in itertools.pairwise(_class_bodies()[owner.__name__]):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            yield field.target.id, " ".join(str(after.value.value).split())


@cache
def _class_bodies() -> dict[str, list[ast.stmt]]:
    """Return the bodies of all classes by name.

    `inspect` cannot find the source of a class that sets its own `__module__`.
    """
    trees = (ast.parse(path.read_text()) for path in Path(streamqd.__path__[0]).rglob("*.py"))
    nodes = (node for tree in trees for node in tree.body)
    return {node.name: node.body for node in nodes if isinstance(node, ast.ClassDef)}


def _signature(name: str, thing: Any) -> str:
    if isinstance(thing, enum.EnumMeta):
        return "\n".join(f"{name}.{member}" for member in thing.__members__)
    try:
        signature = inspect.signature(thing)
    except ValueError:
        return name
    kept = [each for each in signature.parameters.values() if each.name not in ("self", "cls")]
    signature = signature.replace(parameters=kept)
    if inspect.isclass(thing):
        signature = signature.replace(return_annotation=inspect.Signature.empty)
    prefix = "async " if inspect.iscoroutinefunction(thing) else ""
    line = f"{prefix}{name}{_printed(str(signature))}"
    if len(line) <= _COLUMNS:
        return line
    # A signature that is too long for one line gets one line for each parameter.
    *parameters, end = [f"    {each}," for each in _parameters(signature)] + [_returned(signature)]
    return "\n".join([f"{prefix}{name}(", *parameters, end])


def _parameters(signature: inspect.Signature) -> Iterator[str]:
    """Yield the parameters as in the source, with the markers `/` and `*` between their kinds."""
    one = inspect.Parameter
    parameters = list(signature.parameters.values())
    for at, parameter in enumerate(parameters):
        before = parameters[at - 1].kind if at else None
        if parameter.kind is one.KEYWORD_ONLY and before not in (
            one.KEYWORD_ONLY,
            one.VAR_POSITIONAL,
        ):
            yield "*"
        yield _printed(str(parameter))
        last = at + 1 == len(parameters) or parameters[at + 1].kind is not one.POSITIONAL_ONLY
        if parameter.kind is one.POSITIONAL_ONLY and last:
            yield "/"


def _returned(signature: inspect.Signature) -> str:
    empty = inspect.Signature(return_annotation=signature.return_annotation)
    return _printed(str(empty))[1:]


def _printed(text: str) -> str:
    """Return part of a signature without the quotes around annotations, which are strings."""
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)
    text = re.sub(r"ForwardRef\('([^']*)'\)", r"\1", text).replace("'", '"')
    # Defaults that are sentinels or functions are printed with addresses, which change on every
    # run.
    return re.sub(r"<[^<>]* at 0x[0-9a-f]+>", "...", text)


def _prose(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "")


def _line(thing: Any) -> str:
    return " ".join(_prose(thing).split())
