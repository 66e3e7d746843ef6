"""Passwords: hidden in all that is shown, and kept from what children inherit."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

URL_VARIABLE = "STREAMQ_REDIS__URL"
_OURS = "STREAMQ_"
# Bounded, so that no text takes long: what is shown may come from anywhere.
_IN_TEXT = re.compile(r"([a-zA-Z0-9.+-]{1,40}://[^:/\s]{0,4096}):[^\s]{0,4096}@")
_PARAMETER_IN_TEXT = re.compile(r"([?&]password=)[^&\s]*", re.IGNORECASE)
_PARAMETER = re.compile(r"([?&]password=)[^&]*", re.IGNORECASE)


def masked(text: str) -> str:
    """The text with the passwords of the URLs in it replaced. Also for broken URLs.

    Where a URL ends in a text can only be guessed: at a space. A value that is a URL goes through
    `masked_url`.
    """
    if "://" not in text and "password=" not in text.lower():
        return text
    return _PARAMETER_IN_TEXT.sub(r"\1***", _IN_TEXT.sub(r"\1:***@", text))


def masked_url(url: str) -> str:
    """The URL with its password replaced, whatever characters that or the user name has."""
    return _replaced(url, ":***", r"\1***")


def has_password(url: str) -> bool:
    """Whether the URL itself holds a password."""
    return masked_url(url) != url


def scrub(environ: MutableMapping[str, str]) -> None:
    """Take the passwords out of the URLs of our own variables, for user code is about to run.

    The address stays, so that whoever connects by it is told that a password is missing.
    """
    for name, text in list(environ.items()):
        if name.startswith(_OURS) and has_password(text):
            environ[name] = _replaced(text, "", "")


def _replaced(url: str, password: str, parameter: str) -> str:
    """The URL with something else for `:PASSWORD` before the host, and for a parameter.

    All up to the last @ belongs to user and password: rather too much is hidden than too little.
    """
    scheme, separator, rest = url.partition("://")
    head, at, host = rest.rpartition("@")
    user, colon, _ = head.partition(":")
    if at and colon and not (scheme.endswith("unix") and rest.startswith("/")):
        url = f"{scheme}{separator}{user}{password}@{host}"
    return _PARAMETER.sub(parameter, url)


def credential(name: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file of a credential that the service manager has given us, None when it has not."""
    directory = environ.get("CREDENTIALS_DIRECTORY")
    path = Path(directory) / name if directory else None
    return path if path is not None and path.exists() else None
