"""The address of Redis, including checks of its URL and the socket of the embedded server."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import stat
from collections.abc import Mapping, Set
from pathlib import Path
from urllib.parse import quote

from streamqd.config import topology
from streamqd.config.schema import Settings
from streamqd.config.topology import EMBEDDED, SOCKET_BYTES_MAX
from streamqd.errors import ConfigError, RedisUnavailableError

_SOCKET = "redis.sock"
_POINTER = "redis.sock.path"
_RUNTIME_DIRECTORIES = ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR")
_LAST_RESORT = Path("/tmp")  # noqa: S108 - the directory created in it must be private


def url_fault(url: str) -> str | None:
    """Return a clause about the problem of the URL, or None if it is valid.

    The clause contains no secret parts of the URL.
    """
    try:
        topology.parse(url)
    except ValueError as error:
        return str(error)
    return None


def redis_url(settings: Settings) -> str:
    """Return the URL to which a connection is made.

    For `embedded:`, this is the URL of the server's socket in state_dir. Raises the errors of
    `socket_path`.
    """
    if settings.redis.url != EMBEDDED:
        return settings.redis.url
    return f"unix://{quote(str(socket_path(settings)))}"


def resolve_url(settings: Settings) -> Settings:
    """Return the settings with `redis.url` replaced by the result of `redis_url`."""
    return dataclasses.replace(
        settings, redis=dataclasses.replace(settings.redis, url=redis_url(settings))
    )


def socket_path(settings: Settings) -> Path:
    """Return the path of the embedded server's socket.

    The socket is in state_dir. If the path in state_dir is too long for a socket, a pointer file in
    state_dir contains a shorter one, which `claim_socket_path` has written. Other users may be able
    to write next to the directory of that socket. The directory must therefore be private, and
    belong to the owner of state_dir or to the current user.

    Raises ConfigError if the directory is not private. Raises RedisUnavailableError if no server
    has started yet.
    """
    state_dir = settings.daemon.state_dir.absolute()
    direct = state_dir / _SOCKET
    if _fits(direct):
        return direct
    # Do not compute the path here, because another user could create that directory first.
    absent = RedisUnavailableError(
        f"no server has been started in {state_dir}; start the daemon", sent=False
    )
    try:
        owner = state_dir.stat().st_uid
        named = Path(os.fsdecode((state_dir / _POINTER).read_bytes().rstrip(b"\n")))
        found = named.parent.lstat()
    except (OSError, ValueError):
        raise absent from None
    if not _is_private(found, {owner, os.geteuid()}):
        problem = (
            f"daemon.state_dir: {named.parent}, which contains the socket of the server according"
            f" to {state_dir / _POINTER}, can be changed by a user who is not the owner of"
            f" state_dir; remove {named.parent} and restart the daemon, or use a shorter path"
        )
        raise ConfigError([problem])
    return named


def claim_socket_path(settings: Settings, environ: Mapping[str, str] = os.environ) -> Path:
    """Create the directory of the socket (mode 0700), and return the path of the socket.

    The server calls this function. If the path in state_dir is too long for a socket, the directory
    is created under $RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR or /tmp. The path is then written to a
    pointer file in state_dir, because commands may run with other environment variables.

    Raises ConfigError if no directory can be used.
    """
    state_dir = settings.daemon.state_dir.absolute()
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            [f"daemon.state_dir: {state_dir} cannot be created ({error.strerror}); choose another"]
        ) from None
    direct = state_dir / _SOCKET
    if _fits(direct):
        return direct
    parents = [environ.get(name, "").partition(":")[0] for name in _RUNTIME_DIRECTORIES]
    for parent in [*parents, str(_LAST_RESORT)]:
        short = _short_path(settings, Path(parent))
        if parent and _fits(short) and _private_directory(short.parent):
            pointer = state_dir / _POINTER
            pointer.write_bytes(os.fsencode(short) + b"\n")
            return short
    problem = (
        f"daemon.state_dir: the path of a socket in {state_dir} has {len(os.fsencode(direct))}"
        f" bytes (maximum: {SOCKET_BYTES_MAX}), and no private directory could be created under"
        " $XDG_RUNTIME_DIR or /tmp instead; use a shorter path"
    )
    raise ConfigError([problem])


def _short_path(settings: Settings, parent: Path) -> Path:
    state_dir = os.path.realpath(settings.daemon.state_dir)
    digest = hashlib.sha256(os.fsencode(state_dir)).hexdigest()[:16]
    return parent / f"streamqd-{digest}" / _SOCKET


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= SOCKET_BYTES_MAX


def _private_directory(path: Path) -> bool:
    """Create the directory, or accept an existing one that is private. Return True on success.

    Other users cannot start a server in such a directory.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        return _is_private(path.lstat(), {os.geteuid()})
    except OSError:
        return False


def _is_private(found: os.stat_result, owners: Set[int]) -> bool:
    """Return True if this is a directory, belongs to an owner in `owners`, and is private."""
    private = not stat.S_IMODE(found.st_mode) & 0o077
    return stat.S_ISDIR(found.st_mode) and found.st_uid in owners and private
