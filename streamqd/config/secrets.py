"""Mask passwords in output, and remove them from the environment of child processes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

URL_VARIABLE = "STREAMQ_REDIS__URL"
_OURS = "STREAMQ_"
_STORE_OPTIONS = "STREAMQ_ARCHIVE__OPTIONS"  # may contain credentials of an object store
# The repetitions are bounded, to limit the time that is spent on untrusted text.
_IN_TEXT = re.compile(r"([a-zA-Z0-9.+-]{1,40}://[^:/\s]{0,4096}):[^\s]{0,4096}@")
_PARAMETER_IN_TEXT = re.compile(r"([?&]password=)[^&\s]*", re.IGNORECASE)
_PARAMETER = re.compile(r"([?&]password=)[^&]*", re.IGNORECASE)


def mask_passwords(text: str) -> str:
    """Return the text with passwords in URLs masked, even if a URL is invalid.

    A URL is assumed to end at the next space. To mask a value that is a URL, use `mask_url`.
    """
    if "://" not in text and "password=" not in text.lower():
        return text
    return _PARAMETER_IN_TEXT.sub(r"\1***", _IN_TEXT.sub(r"\1:***@", text))


def mask_url(url: str) -> str:
    """Return a URL with its password masked. The user name and the password may be unencoded."""
    return _replace_password(url, ":***", r"\1***")


def has_password(url: str) -> bool:
    """Return True if the URL contains a password."""
    return mask_url(url) != url


def scrub(environ: MutableMapping[str, str]) -> None:
    """Remove passwords from STREAMQ_ variables, before code of the user runs.

    The address in a URL is kept, so that connecting to it fails with an authentication error.
    """
    environ.pop(_STORE_OPTIONS, None)
    for name, text in list(environ.items()):
        if name.startswith(_OURS) and has_password(text):
            environ[name] = _replace_password(text, "", "")


def _replace_password(url: str, password: str, parameter: str) -> str:
    """Return a URL with its password replaced, both before the host and in the query string.

    `password` replaces `:PASSWORD` before the host, and `parameter` replaces the query parameter.
    Everything up to the last @ counts as user and password, so that too much is hidden rather than
    too little.
    """
    scheme, separator, rest = url.partition("://")
    head, at, host = rest.rpartition("@")
    user, colon, _ = head.partition(":")
    if at and colon and not (scheme.endswith("unix") and rest.startswith("/")):
        url = f"{scheme}{separator}{user}{password}@{host}"
    return _PARAMETER.sub(parameter, url)


def credential(name: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file of a systemd credential, or None if it does not exist.

    Source: $CREDENTIALS_DIRECTORY.
    """
    directory = environ.get("CREDENTIALS_DIRECTORY")
    path = Path(directory) / name if directory else None
    return path if path is not None and path.exists() else None


def is_credential(path: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if a file is a systemd credential.

    systemd protects credentials with ACLs, which appear as group permissions in the mode of the
    file.
    """
    directory = environ.get("CREDENTIALS_DIRECTORY")
    return bool(directory and path.is_relative_to(directory))
