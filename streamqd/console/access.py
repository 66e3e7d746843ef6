"""Access control: roles, sessions, the users file, users named by a proxy, and CSRF protection.

A person is identified by a session cookie, or by a header that a configured proxy adds. For each
request, `app` asks this module who sent it and whether that person may access the route. The
sessions are stored in memory.
"""

from __future__ import annotations

import getpass
import hashlib
import hmac
import ipaddress
import os
import secrets
import stat
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from urllib.parse import urlsplit

from streamqd import config
from streamqd.config.secrets import is_credential
from streamqd.errors import RequestRefusedError

SESSION_SECONDS = 12 * 3_600.0  # seconds without a request after which a session expires
SESSIONS_MAX = 1_000
NAME_CHARS = 64
FAILURES_MAX = 10  # limit of wrong passwords per minute, for all names together
_SCRYPT = {"n": 1 << 14, "r": 8, "p": 1}
_SECURE_SITES = ("same-origin",)


class Role(IntEnum):
    """The permissions of a person. Each role includes the lower ones."""

    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3

    @property
    def word(self) -> str:
        """The name in settings and pages."""
        return self.name.lower()


def parse_role(word: str) -> Role:
    """Return the role with this name. Raises RequestRefusedError if there is none."""
    try:
        return Role[word.upper()]
    except KeyError:
        words = ", ".join(each.word for each in Role)
        raise RequestRefusedError(f"role {word!r} is not valid; use one of {words}") from None


@dataclass(frozen=True, slots=True)
class Person:
    """A logged-in person.

    `bodies` says how the console shows payloads to this person: "show", "masked" or "hidden".
    """

    name: str
    role: Role
    bodies: str

    def may(self, role: Role) -> bool:
        """Return True if the person has this role or a higher one."""
        return self.role >= role


@dataclass(frozen=True, slots=True)
class UserRecord:
    """A line of the users file: NAME:ROLE:SALT:HASH, with a scrypt hash of the password."""

    name: str
    role: Role
    salt: bytes
    digest: bytes

    def accepts(self, password: str) -> bool:
        """Return True if this is the person's password."""
        return hmac.compare_digest(_digest(password, self.salt), self.digest)

    def line(self) -> str:
        """Return the record as a line of the users file."""
        return f"{self.name}:{self.role.word}:{self.salt.hex()}:{self.digest.hex()}"


def _digest(password: str, salt: bytes) -> bytes:
    return hashlib.scrypt(password.encode(), salt=salt, **_SCRYPT)


def new_user(name: str, role: Role, password: str) -> UserRecord:
    """Return a new record for the users file.

    Raises RequestRefusedError if the name or the password is not allowed.
    """
    if not name or len(name) > NAME_CHARS or ":" in name or not name.isprintable():
        raise RequestRefusedError(
            f"user {name!r} is not a valid name; use 1 to {NAME_CHARS} characters, no :"
        )
    if len(password) < 8:
        raise RequestRefusedError("password must have at least 8 characters")
    salt = secrets.token_bytes(16)
    return UserRecord(name, role, salt, _digest(password, salt))


def read_users(path: Path) -> dict[str, UserRecord]:
    """Read a users file and return its records by name.

    Raises RequestRefusedError if the file cannot be read, if other users may read it, or if a line
    is invalid. The error contains the number of that line.
    """
    try:
        with path.open(encoding="utf-8") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            lines = opened.read(1 << 20).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise RequestRefusedError(
            f"console.users_file {path} cannot be read ({reason}); run `streamqd console"
            " --add-user NAME` to create it"
        ) from None
    if stat.S_IMODE(mode) & 0o077 and not is_credential(path):
        raise RequestRefusedError(
            f"console.users_file {path} is readable by others; run chmod 600 {path}"
        )
    found = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            name, role, salt, digest = line.split(":")
            key = bytes.fromhex(salt), bytes.fromhex(digest)
            found[name] = UserRecord(name, parse_role(role), *key)
        except (ValueError, RequestRefusedError):
            raise RequestRefusedError(
                f"console.users_file {path}:{number} is not NAME:ROLE:SALT:HASH; write it with"
                " `streamqd console --add-user NAME`"
            ) from None
    return found


def write_user(path: Path, user: UserRecord) -> None:
    """Add or replace a person in the users file. A new file gets mode 0600."""
    known = read_users(path) if path.exists() else {}
    known[user.name] = user
    text = "".join(f"{each.line()}\n" for each in known.values())
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    draft.touch(0o600, exist_ok=False)
    with draft.open("w") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    draft.replace(path)


@dataclass(slots=True)
class _Session:
    person: Person
    used: float  # time of the last request, monotonic


@dataclass(frozen=True, slots=True)
class AccessRequest:
    """The parts of a request that access control needs. Header names are in lower case."""

    method: str
    peer: str  # address of the client, or '' for a unix socket
    scheme: str
    headers: Mapping[str, str]
    cookies: Mapping[str, str]


@dataclass
class ConsoleAccess:
    """The users and sessions of one console process. All threads share it."""

    settings: config.Console
    # Browsers send the cookies of a host to all its ports, so the name of the cookie contains the
    # port.
    cookie_suffix: str = ""
    users: dict[str, UserRecord] | None = None
    _sessions: dict[str, _Session] = field(default_factory=dict)
    _failures: list[float] = field(default_factory=list)
    _token: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    # --- persons ---

    @property
    def logs_in_by_link(self) -> bool:
        """True if a link with a token is the only way to log in."""
        return self.users is None and self.settings.proxy_header is None

    def person(self, request: AccessRequest) -> Person | None:
        """Return the person who sent a request, or None if the person is not logged in."""
        header = self.settings.proxy_header
        if header is not None and self.trusts(request.peer):
            name = request.headers.get(header.lower(), "").strip()
            if name and len(name) <= NAME_CHARS and name.isprintable():
                known = (self.users or {}).get(name)
                return self._make_person(
                    name, known.role if known else parse_role(self.settings.proxy_role)
                )
        value = request.cookies.get(self.cookie_name(secure=self.is_secure(request)), "")
        now = time.monotonic()
        with self._lock:
            session = self._sessions.get(_key(value))
            if session is None or now - session.used > SESSION_SECONDS:
                return None
            session.used = now
            return session.person

    def trusts(self, peer: str) -> bool:
        """Return True if the peer is a configured proxy.

        This is never true for a Unix socket ('').
        """
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:
            return False
        return any(address in ipaddress.ip_network(each) for each in self.settings.proxy_from)

    def is_secure(self, request: AccessRequest) -> bool:
        """Return True if the browser reaches this process or a configured proxy over HTTPS."""
        forwarded = request.headers.get("x-forwarded-proto", "")
        return request.scheme == "https" or (forwarded == "https" and self.trusts(request.peer))

    def _make_person(self, name: str, role: Role) -> Person:
        bodies = getattr(self.settings, f"{role.word}_bodies")
        return Person(name, Role.VIEWER if self.settings.read_only else role, bodies)

    # --- logins ---

    def new_token(self) -> str:
        """Return the token for a new login link. The previous token becomes invalid."""
        with self._lock:
            self._token = secrets.token_urlsafe(24)
            return self._token

    def log_in_by_token(self, token: str) -> str | None:
        """Exchange a token for the value of a new session's cookie.

        Return None if the token is wrong.

        A token works only once.
        """
        with self._lock:
            right = bool(self._token) and hmac.compare_digest(token.encode(), self._token.encode())
            if right:
                self._token = ""
        return self._start_session(self._make_person(_own_name(), Role.ADMIN)) if right else None

    def log_in_by_password(self, name: str, password: str) -> str | None:
        """Return the value of a new session's cookie, or None if the name or the password is wrong.

        Raises RequestRefusedError after too many wrong passwords.
        """
        now = time.monotonic()
        with self._lock:
            self._failures = [each for each in self._failures if now - each < 60]
            if len(self._failures) >= FAILURES_MAX:
                raise RequestRefusedError("too many wrong passwords; try again in a minute")
        user = (self.users or {}).get(name)
        # The password is hashed even if the name is unknown. Otherwise, the shorter response time
        # would reveal which names exist.
        accepted = (user or _NOBODY).accepts(password)
        if user is None or not accepted:
            with self._lock:
                self._failures.append(now)
            return None
        return self._start_session(self._make_person(user.name, user.role))

    def _start_session(self, person: Person) -> str:
        value = secrets.token_urlsafe(32)
        with self._lock:
            if len(self._sessions) >= SESSIONS_MAX:
                oldest = min(self._sessions, key=lambda key: self._sessions[key].used)
                del self._sessions[oldest]
            self._sessions[_key(value)] = _Session(person, time.monotonic())
        return value

    def log_out(self, request: AccessRequest) -> None:
        """End the session that a request belongs to."""
        value = request.cookies.get(self.cookie_name(secure=self.is_secure(request)), "")
        with self._lock:
            self._sessions.pop(_key(value), None)

    # --- cookies ---

    def cookie_name(self, *, secure: bool) -> str:
        """Return the name of the session cookie.

        Over HTTPS, the name has the prefix `__Host-`, so browsers accept the cookie only from this
        host.
        """
        return f"{'__Host-' if secure else ''}streamqd{self.cookie_suffix}"

    def cookie(self, value: str, *, secure: bool) -> str:
        """Return the Set-Cookie header for a session. An empty value deletes the cookie."""
        end = "" if value else "; Max-Age=0"
        safe = "; Secure" if secure else ""
        name = self.cookie_name(secure=secure)
        return f"{name}={value}; Path=/; HttpOnly; SameSite=Strict{safe}{end}"


def _key(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


def _own_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


_NOBODY = UserRecord("", Role.VIEWER, b"-" * 16, b"")


def is_own_request(request: AccessRequest, host: str) -> bool:
    """Return True if a request comes from a page of this console, and not from another site.

    Browsers send the header Sec-Fetch-Site only over HTTPS and to loopback addresses. Without it,
    the Origin header must match `host`, the name and port of the console in the browser's URL.
    """
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in _SECURE_SITES
    origin = urlsplit(request.headers.get("origin", ""))
    return bool(host) and origin.netloc.lower() == host.lower()


def browser_host(request: AccessRequest, access: ConsoleAccess) -> str:
    """Return the name and port of the console in the browser's URL."""
    forwarded = request.headers.get("x-forwarded-host")
    if forwarded and access.trusts(request.peer):
        return forwarded.partition(",")[0].strip()
    return request.headers.get("host", "")


def check_listening(console: config.Console) -> None:
    """Raise RequestRefusedError if other hosts could use the console without logging in."""
    host, port = console.address
    if config.is_loopback(host) or console.users_file or console.proxy_header:
        return
    raise RequestRefusedError(
        f"console.bind {console.bind} can be reached by other hosts without a login; set"
        f" console.users_file or console.proxy_header, or bind 127.0.0.1:{port}"
    )


def make_access(console: config.Console, port: int) -> ConsoleAccess:
    """Return the access control for a console that listens on this port.

    Raises RequestRefusedError if the users file or a role is invalid.
    """
    users = read_users(console.users_file) if console.users_file else None
    if users is not None and not users and console.proxy_header is None:
        raise RequestRefusedError(
            f"console.users_file {console.users_file} has no user; run `streamqd console --add-user"
            " NAME`"
        )
    return ConsoleAccess(console, f"-{port}", users)
