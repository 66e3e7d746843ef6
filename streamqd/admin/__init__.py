"""Views and actions for operators. The command line and the web console use them.

The functions return frozen dataclasses. `as_json` turns these into the documents of `--json`, so
their docstrings are the reference of the JSON fields: the names are the same, `_unix_ms` fields are
unix milliseconds by the server's clock, and None is null. Nothing here prints, and views do not
write.
"""

from __future__ import annotations

import base64
import dataclasses
from typing import Any


def as_json(value: Any) -> Any:
    """Turn dataclasses into JSON values, or the result of their method `document`.

    A field with bytes becomes a string. If the bytes are not UTF-8, the field gets the suffix
    `_base64`.
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
    """Return the fields and properties in `names`, which is separated by spaces, in that order.

    `others` replaces some of them.
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
