"""The connection: one socket to one Redis node, and what can be known when it fails.

Every command and script of streamqd goes through a `Link`. It never repeats anything by itself:
a repeated XADD is a duplicate, a repeated XREADGROUP orphans messages. It says instead whether the
command can have been executed (`RedisUnavailable.sent`), and the caller, who knows what the command
means, decides.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import redis
from redis.connection import AbstractConnection

from streamqd.errors import RedisRefused, RedisUnavailable
from streamqd.store import scripts
from streamqd.store.wire import Wire, wire_for

if TYPE_CHECKING:
    import socket

    from streamqd import config
    from streamqd.store.scripts import Call, Reply

# After these replies the connection serves us no more: it lost its login, or the node its role.
_DROP_AFTER = frozenset({"NOAUTH", "READONLY"})
_NAME = re.compile(r"[!-~]{1,200}")
_REPEATED = re.compile(r"^Error -?\d+ connecting to \S+\. |^no reply from \S+: ")


class Link:
    """One connection to one Redis node, opened on first use.

    Used by one thread of the process that created it (or that called `detach`). No automatic
    retries, RESP2, replies as raw bytes. After a `RedisUnavailable` the connection is closed and
    the next use opens a new one; `opened` counts them.
    """

    def __init__(self, settings: config.Redis, *, timeout: float, name: str) -> None:
        """Prepare, without connecting. `timeout` bounds one exchange, in seconds.

        Connecting is bounded by it too, and by `connect_timeout`. `name` is what CLIENT LIST shows.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"not a connection name: {name!r}")
        self.opened = 0
        self.timeout = timeout
        self.name = name
        self._pid = os.getpid()
        self._wire = wire_for(settings, timeout)

    def execute(self, *args: Any) -> Any:
        """Run one command and return its reply. Raises RedisRefused or RedisUnavailable."""
        reply = self._exchange((args,))[0]
        if isinstance(reply, RedisRefused):
            raise reply
        return reply

    def pipeline(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Run commands in one write; error replies are RedisRefused elements of the result."""
        return self._exchange(commands) if commands else []

    def run(self, call: Call) -> Reply:
        """Run a script. Raises RedisRefused, RedisUnavailable, ContractError."""
        raw = self._exchange((_by_sha(call),))[0]
        if _unknown_script(raw):
            raw = self._exchange((_by_source(call),))[0]
        if isinstance(raw, RedisRefused):
            raise raw
        return scripts.reply(call, raw)

    def run_many(self, calls: Sequence[Call]) -> list[Reply | RedisRefused]:
        """Run scripts in one write, in order but for those that the server has to be taught first.

        Calls must not depend on the order among themselves.
        """
        if not calls:
            return []
        raws = self._exchange([_by_sha(call) for call in calls])
        missing = [index for index, raw in enumerate(raws) if _unknown_script(raw)]
        if missing:
            try:
                again = self._exchange([_by_source(calls[index]) for index in missing])
            except RedisUnavailable as error:
                # The others have been executed already, whatever became of these.
                error.sent = error.sent or len(missing) < len(calls)
                raise
            for index, raw in zip(missing, again, strict=True):
                raws[index] = raw
        return [
            raw if isinstance(raw, RedisRefused) else scripts.reply(call, raw)
            for call, raw in zip(calls, raws, strict=True)
        ]

    def open(self) -> None:
        """Connect now, when not connected. Raises RedisUnavailable with `sent=False`."""
        self._check_process()
        if self.connected:
            return
        wire = self._wire
        wire.begin(self.timeout)
        try:
            wire.connect()  # type: ignore[no-untyped-call]
            wire.transmit([_pack(wire, ("CLIENT", "SETNAME", self.name))])
            answer = wire.receive()
            # A restricted user may be forbidden to name itself; that is no reason not to work.
            if isinstance(answer, RedisRefused) and answer.code != "NOPERM":
                raise answer
        except RedisRefused as error:
            wire.drop()
            text = f"{self.address} refused us: {str(error).rstrip('.')}{_advice(error)}"
            raise RedisUnavailable(text, sent=False) from error
        except (redis.RedisError, RedisUnavailable, OSError, UnicodeError) as error:
            wire.drop()
            raise RedisUnavailable(
                f"cannot connect to {self.address}: {_reason(error)}", sent=False
            ) from error
        except BaseException:
            wire.drop()
            raise
        finally:
            wire.finish()
        self.opened += 1

    def close(self) -> None:
        """Close the connection; the next use opens a new one."""
        if os.getpid() == self._pid:
            self._wire.drop()
        else:
            self.detach()

    def detach(self) -> None:
        """In a forked child: forget the parent's socket without touching it.

        The descriptor itself stays open in the child until it closes it. Afterwards the link
        belongs to the child, which may use it: it then opens a connection of its own.
        """
        self._wire.forget()
        self._pid = os.getpid()

    def socket(self) -> socket.socket:
        """Return the open socket (opening it first), for writing and reading packed commands.

        Whoever leaves an exchange half done must close the link.
        """
        self.open()
        sock: socket.socket = self._wire.raw_socket()
        return sock

    def fileno(self) -> int | None:
        """Return the descriptor, None while not connected."""
        sock = self._wire.raw_socket()
        return None if sock is None else int(sock.fileno())

    @property
    def connected(self) -> bool:
        return bool(self._wire.is_connected)

    @property
    def connection(self) -> AbstractConnection:
        """The redis-py connection below. It never connects by itself: call `open` first."""
        return self._wire

    @property
    def address(self) -> str:
        """Where it connects to, for people: never with credentials."""
        return self._wire.address

    def _exchange(self, commands: Iterable[Sequence[Any]]) -> list[Any]:
        wire = self._wire
        packed = [_pack(wire, command) for command in commands]
        self._check_process()
        try:
            if wire.is_connected and wire.ended():
                wire.drop()
            self.open()
            wire.begin(self.timeout)
            wire.transmit(packed)
            replies = [wire.receive() for _ in packed]
        except BaseException:
            # Also when interrupted by an exception from a signal handler: a reply that is still
            # under way must never be taken for the answer to the next command.
            wire.drop()
            raise
        finally:
            wire.finish()
        if any(isinstance(reply, RedisRefused) and reply.code in _DROP_AFTER for reply in replies):
            wire.drop()
        return replies

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(f"the link {self.name} belongs to process {self._pid}; detach it")


def _pack(wire: Wire, command: Sequence[Any]) -> bytes:
    return b"".join(wire.pack_command(*command))  # type: ignore[no-untyped-call]


def _by_sha(call: Call) -> tuple[Any, ...]:
    return ("EVALSHA", call.script.sha, len(call.script.keys), *call.argv)


def _by_source(call: Call) -> tuple[Any, ...]:
    return ("EVAL", call.script.source, len(call.script.keys), *call.argv)


def _unknown_script(raw: Any) -> bool:
    return isinstance(raw, RedisRefused) and raw.code == "NOSCRIPT"


# --- what a server says of itself -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the start checks look at. `time` is the server's clock, in unix seconds."""

    product: str  # redis | valkey
    version: str
    mode: str  # standalone | sentinel | cluster
    role: str  # master | slave
    maxmemory: int
    maxmemory_policy: str
    aof: bool
    loading: bool
    pid: int
    time: float


def _advice(error: RedisRefused) -> str:
    if error.code in ("NOAUTH", "WRONGPASS"):
        return "; the password comes from redis.url or redis.password_file"
    return ""


def _reason(error: BaseException) -> str:
    """Why a connection failed, without the address that the library's text repeats."""
    return _REPEATED.sub("", str(error)).rstrip(".")


def server_facts(link: Link) -> ServerFacts:
    """Ask the server for its version and settings. Needs the rights to INFO and TIME."""
    info_raw, time_raw = link.pipeline((("INFO",), ("TIME",)))
    for reply in (info_raw, time_raw):
        if isinstance(reply, RedisRefused):
            raise reply
    info: dict[str, str] = {}
    for line in info_raw.decode("utf-8", "replace").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            info[name] = value
    # Valkey calls itself redis 7.2.4 for old clients, and tells its own version beside that.
    product = "valkey" if "valkey_version" in info else "redis"
    mode = info.get("server_mode") or info.get("redis_mode", "standalone")
    memory_limit = 0
    with contextlib.suppress(ValueError):
        memory_limit = int(info.get("maxmemory", "0"))
    return ServerFacts(
        product=product,
        version=info.get(f"{product}_version", ""),
        mode=mode,
        role=info.get("role", ""),
        maxmemory=memory_limit,
        maxmemory_policy=info.get("maxmemory_policy", ""),
        aof=info.get("aof_enabled") == "1",
        loading=info.get("loading") == "1",
        pid=int(info.get("process_id", "0")),
        time=int(time_raw[0]) + int(time_raw[1]) / 1e6,
    )
