"""Passwords: hidden in all that is shown, and kept from what children inherit."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

URL_VARIABLE = "STREAMQ_REDIS__URL"
_OURS = "STREAMQ_"
# Bounded, so that no text takes long: what is shown may come from anywhere.
_IN_URL = re.compile(r"([a-zA-Z0-9.+-]{1,40}://[^:@/\s]{0,256}):[^\s]{0,4096}@")
_PARAMETER = re.compile(r"([?&]password=)[^&\s]*")


def masked(text: str) -> str:
    """The text with the passwords of the URLs in it replaced. Also for broken URLs."""
    if "://" not in text and "password=" not in text:
        return text
    return _PARAMETER.sub(r"\1***", _IN_URL.sub(r"\1:***@", text))


def has_password(url: str) -> bool:
    """Whether the URL itself holds a password."""
    return masked(url) != url


def scrub(environ: MutableMapping[str, str]) -> None:
    """Take the passwords out of the URLs of our own variables, for user code is about to run.

    The address stays, so that whoever connects by it is told that a password is missing.
    """
    for name, text in list(environ.items()):
        if name.startswith(_OURS) and has_password(text):
            environ[name] = _PARAMETER.sub("", _IN_URL.sub(r"\1@", text))


def credential(name: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file of a credential that the service manager has given us, None when it has not."""
    directory = environ.get("CREDENTIALS_DIRECTORY")
    path = Path(directory) / name if directory else None
    return path if path is not None and path.exists() else None
