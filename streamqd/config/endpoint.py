"""Where Redis listens: checks of its URL, the embedded server's socket."""

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
from streamqd.errors import ConfigError, RedisUnavailable

_SOCKET = "redis.sock"
_POINTER = "redis.sock.path"
_RUNTIME_DIRECTORIES = ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR")
_LAST_RESORT = Path("/tmp")  # noqa: S108 - the directory made in it must be ours alone


def url_fault(url: str) -> str | None:
    """What is wrong with the URL, as a clause without any part of it that may be secret."""
    try:
        topology.parse(url)
    except ValueError as error:
        return str(error)
    return None


def redis_url(settings: Settings) -> str:
    """The URL to connect to: `embedded:` becomes the socket of the server in state_dir."""
    if settings.redis.url != EMBEDDED:
        return settings.redis.url
    return f"unix://{quote(str(socket_path(settings)))}"


def resolved(settings: Settings) -> Settings:
    """The settings with `redis.url` being what to connect to."""
    return dataclasses.replace(
        settings, redis=dataclasses.replace(settings.redis, url=redis_url(settings))
    )


def socket_path(settings: Settings) -> Path:
    """Socket of the embedded server: in state_dir, or where its pointer file there says.

    A path that is too long for a socket is replaced by a short one, see `claim_socket_path`. Its
    directory lies where others may write, so it must belong to the owner of state_dir or to us, and
    to nobody else. Raises ConfigError when it does not, RedisUnavailable when there is none yet.
    """
    state_dir = settings.daemon.state_dir.absolute()
    direct = state_dir / _SOCKET
    if _fits(direct):
        return direct
    # Never a guess: a directory that we expect and nobody has made could be made by anybody.
    absent = RedisUnavailable(f"no server has been started in {state_dir}", sent=False)
    try:
        owner = state_dir.stat().st_uid
        named = Path(os.fsdecode((state_dir / _POINTER).read_bytes().rstrip(b"\n")))
        found = named.parent.lstat()
    except (OSError, ValueError):
        raise absent from None
    if not _is_private(found, {owner, os.geteuid()}):
        problem = (
            f"daemon.state_dir: {named.parent}, where {state_dir / _POINTER} says that the server"
            " listens, is not a directory of the owner of state_dir alone: somebody else may answer"
            f" there; remove {named.parent} and start the daemon again, or use a shorter path"
        )
        raise ConfigError([problem])
    return named


def claim_socket_path(settings: Settings, environ: Mapping[str, str] = os.environ) -> Path:
    """Make the socket's directory (mode 0700) and return the socket's path. For its server.

    When state_dir is too deep, the socket lives in a directory of its own under
    $RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR or /tmp, and a file in state_dir says where, because
    other commands run with another environment. ConfigError when no place can be used.
    """
    state_dir = settings.daemon.state_dir.absolute()
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            [f"daemon.state_dir: {state_dir} cannot be made ({error.strerror}): name another"]
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
        f" bytes, the system allows {SOCKET_BYTES_MAX}, and no private directory could be made"
        " under $XDG_RUNTIME_DIR or /tmp instead: use a shorter path"
    )
    raise ConfigError([problem])


def _short_path(settings: Settings, parent: Path) -> Path:
    state_dir = os.path.realpath(settings.daemon.state_dir)
    digest = hashlib.sha256(os.fsencode(state_dir)).hexdigest()[:16]
    return parent / f"streamqd-{digest}" / _SOCKET


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= SOCKET_BYTES_MAX


def _private_directory(path: Path) -> bool:
    """Make the directory, or accept one that is ours alone: nobody can have put a server there."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        return _is_private(path.lstat(), {os.geteuid()})
    except OSError:
        return False


def _is_private(found: os.stat_result, owners: Set[int]) -> bool:
    """Whether it is a directory, not a link, in which only one of these users may write or look."""
    private = not stat.S_IMODE(found.st_mode) & 0o077
    return stat.S_ISDIR(found.st_mode) and found.st_uid in owners and private
