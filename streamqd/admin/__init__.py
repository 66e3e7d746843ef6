"""Views and actions for operators, used by the command line and the web console.

The functions return frozen dataclasses, which `as_json` turns into the documents that `--json`
prints. Fields and JSON fields have the same names, so the docstrings of these classes also document
the JSON. `_unix_ms` fields are Unix milliseconds on the server's clock, and None becomes null.
Nothing in this package prints, and its views never write to Redis.
"""

from __future__ import annotations

import base64
import dataclasses
from typing import Any


def as_json(value: Any) -> Any:
    """Convert a value to JSON types.

    A dataclass becomes an object with its fields. If a value has a method `document`, its result is
    converted instead. A field that contains bytes becomes a string. If the bytes are not UTF-8,
    they are encoded in Base64, and `_base64` is added to the field's name.
    """
    if hasattr(value, "document"):
        return as_json(value.document())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)]
    elif isinstance(value, dict):
        pairs = [(str(name), content) for name, content in value.items()]
    elif isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    else:
        return value
    return dict(_pair(name, content) for name, content in pairs)


def named_fields(value: object, names: str, **others: Any) -> dict[str, Any]:
    """Return the named fields and properties of an object as a dict, in the given order.

    `names` is a string of names that are separated by spaces. A keyword argument replaces the value
    of the field with the same name.
    """
    return {
        name: others[name] if name in others else getattr(value, name) for name in names.split()
    }


def _pair(name: str, value: Any) -> tuple[str, Any]:
    if not isinstance(value, bytes):
        return name, as_json(value)
    try:
        return name, value.decode()
    except UnicodeDecodeError:
        return f"{name}_base64", base64.b64encode(value).decode()
