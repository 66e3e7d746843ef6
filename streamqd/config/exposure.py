"""Find settings that let other users or hosts read data or run code.

These are connections without TLS, public HTTP endpoints, and code files that any user may write.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from streamqd.config import topology
from streamqd.config.problems import Problems
from streamqd.config.schema import Http, Redis, Settings
from streamqd.config.secrets import URL_VARIABLE, credential, has_password

TOKEN_CREDENTIAL = "http-token"  # noqa: S105 - the name of the credential, not its value


def check_exposure(settings: Settings, problems: Problems, environ: Mapping[str, str]) -> None:
    """Add a problem for each exposure that the settings do not explicitly allow."""
    _check_plain(settings.redis, problems)
    _check_public(settings.http, problems, environ)


def _check_plain(redis: Redis, problems: Problems) -> None:
    path = ("redis", "url")
    if redis.allow_insecure or not problems.ok(path, ("redis", "allow_insecure")):
        return
    remote = [host for host in _plain_hosts(redis.url) if not is_loopback(host)]
    if remote:
        problems.add(
            path,
            f"{remote[0]} is another host, and without TLS anyone on the network path can read"
            " and change all data; write rediss://, or set redis.allow_insecure = true if the"
            " network is private",
        )


def _plain_hosts(url: str) -> list[str]:
    """Return the hosts to which a URL connects without TLS."""
    try:
        found = topology.parse(url)
    except ValueError:
        return []  # reported elsewhere
    return [] if found.tls else [each.host for each in found.addresses]


def _check_public(http: Http, problems: Problems, environ: Mapping[str, str]) -> None:
    names = ("bind", "token_file", "allow_public")
    if not problems.ok(*(("http", name) for name in names)):
        return
    if is_public(http) and not http.allow_public and token_path(http, environ) is None:
        problems.add(
            ("http", "bind"),
            "any client that reaches this address could read the names of topics, groups and"
            " hosts; set http.token_file to a file with a token, bind 127.0.0.1 or a unix socket,"
            " or set http.allow_public = true",
        )


def is_public(http: Http) -> bool:
    """Return True if other hosts can reach the HTTP endpoints."""
    address = http.address
    return isinstance(address, tuple) and not is_loopback(address[0])


def token_path(http: Http, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file of the HTTP token: the systemd credential if it exists, or `token_file`."""
    return credential(TOKEN_CREDENTIAL, environ) or http.token_file


def is_loopback(host: str) -> bool:
    """Return True if the host is localhost or a loopback address. Host names are not resolved."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# --- warnings -------------------------------------------------------------------------------------


def exposure_warnings(settings: Settings, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a warning for each exposure that is allowed but risky, each as one sentence."""
    found = []
    if is_public(settings.http) and token_path(settings.http, environ) is None:
        found.append("http.bind: any client that reaches this address can read metrics and status")
    if has_password(environ.get(URL_VARIABLE, "")):
        found.append(
            f"redis.url: its password is in the environment ({URL_VARIABLE}), which anyone who may"
            " inspect this process can read; use redis.password_file, or the systemd credential"
            " redis-password"
        )
    return found


def root_warnings() -> list[str]:
    """Return a warning if this process runs as root, because then every handler does too."""
    if os.geteuid() != 0:
        return []
    return ["daemon: it runs as root, and so does every handler; run it as a dedicated user"]


def find_world_writable(path: Path) -> Path | None:
    """Return the code file or its directory if any user may write to it, or None.

    Paths on read-only file systems do not count.
    """
    for each in (path, path.parent):
        try:
            mode, readonly = each.stat().st_mode, os.statvfs(each).f_flag & os.ST_RDONLY
        except OSError:
            continue
        if mode & stat.S_IWOTH and not readonly:
            return each
    return None
