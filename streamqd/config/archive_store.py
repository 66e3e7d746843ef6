"""The settings of an archive in an object store."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from streamqd.config.setting import JsonText, setting

# With this option, a commit can overwrite the commit of another writer.
UNSAFE = "aws_s3_allow_unsafe_rename"
# Options that prevent conflicting writes. streamqd itself sets them to "etag".
_CONDITIONAL = {"aws_conditional_put", "conditional_put"}
_SECRET = re.compile(r"secret|password|token|credential|sas|_key(?!_?id)|service_account")


@dataclass(frozen=True, slots=True)
class ArchiveStore:
    """Object store access for `streamqd pipeline` and `streamqd trace`. The daemon ignores it."""

    options: JsonText = setting(
        "{}",
        "Options for the client of s3://, gs:// and abfss:// URLs, such as `{ aws_region ="
        ' "eu-central-1" }`. They are used in addition to the environment and the profile. For'
        " credentials, use the environment rather than this setting.",
        secret=True,
    )

    def __repr__(self) -> str:
        return f"ArchiveStore(options={'{}' if self.options == '{}' else '***'})"

    @property
    def pairs(self) -> dict[str, str]:
        """The options as a dict, with their names in lower case."""
        found: dict[str, Any] = json.loads(self.options)
        return {name.lower(): _text(value) for name, value in found.items()}


def options_fault(options: str) -> str:
    """Return a clause about the first option that cannot be used, or ''.

    The clause contains no value, because a value may be a secret.
    """
    found = json.loads(options)
    if not isinstance(found, dict):
        return "is not a table; write [archive.options]"
    for name, value in found.items():
        if not isinstance(value, str | bool | int):
            return f"has {name}, which is not a string; write it in quotes"
        if name.lower() == UNSAFE:
            return f"has {name}, with which two writers overwrite each other; remove it"
        if name.lower() in _CONDITIONAL:
            return f"has {name}, which streamqd sets itself; remove it"
    return ""


def names_secrets(options: str) -> bool:
    """Return True if one of the options is a credential."""
    return any(is_secret(name) for name in json.loads(options))


def is_secret(name: str) -> bool:
    """Return True if an option or a variable with this name has a value that must not be shown."""
    return _SECRET.search(name.lower()) is not None


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
