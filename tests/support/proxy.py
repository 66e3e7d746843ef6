"""A proxy between a client and a real server, which misbehaves on demand.

It parses Redis frames, so "the reply of the third EVALSHA" is exact, however the bytes are split.
Handshake commands (CLIENT, AUTH, SELECT, HELLO) are never counted.

    with FaultProxy(server.socket_path) as proxy:
        link = connect(proxy.settings, timeout=1.0, name="test")
        trigger = proxy.arm(Fault.DROP_REPLY, command="EVALSHA", nth=3)
        ...
        assert trigger.hit
"""

from __future__ import annotations

import contextlib
import enum
import shutil
import socket
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

from streamqd import config

_UNCOUNTED = frozenset({b"CLIENT", b"AUTH", b"SELECT", b"HELLO"})
_PIECE = 65536
_JOIN_SECONDS = 10


class Fault(enum.Enum):
    """The fault of one command."""

    CUT_BEFORE = "the connection is reset; the server never sees the command"
    DROP_REPLY = "the server executes it; the connection is reset instead of the reply"
    CUT_AFTER = "its reply comes, then a reset"
    SWALLOW_REPLY = "the server executes it; neither this reply nor any later one comes"
    CUT_REPLY = "the server executes it; half of the reply comes, then a reset"
    HOLD_REQUEST = (
        "it waits in the proxy until `release`; then it is sent, even if the client has left"
    )
    HOLD_REPLY = "its reply waits in the proxy until `release`"
    FORGE_REPLY = "the server executes it; another reply comes instead"


@dataclass
class Trigger:
    """An armed fault.

    `hit` is set once its command has arrived. `release` ends a fault of the kind HOLD_.
    """

    fault: Fault
    wanted: Callable[[list[bytes]], bool]
    left: int
    forged: bytes = b""  # the reply of FORGE_REPLY, in RESP2
    happened: threading.Event = field(default_factory=threading.Event)
    let_go: threading.Event = field(default_factory=threading.Event)

    @property
    def hit(self) -> bool:
        return self.happened.is_set()

    def wait(self, timeout: float = 10.0) -> None:
        """Wait until the command has arrived."""
        assert self.happened.wait(timeout), f"{self.fault.name}: its command did not come"

    def release(self) -> None:
        """Forward the command or reply that is being held."""
        self.let_go.set()

    def disarm(self) -> None:
        """Let all further commands pass."""
        self.left = 0


class FaultProxy:
    """Listens on a unix socket, or on a loopback port with `tcp`, and forwards to a server.

    `target` is the path of a unix socket, or a pair of host and port. While `refusing` is set, new
    connections are closed immediately. The proxy stores the last `remember` commands, or all of
    them if no number is given. It runs its own threads, which `close` stops.
    """

    def __init__(
        self,
        target: Path | str | tuple[str, int],
        *,
        tcp: bool = False,
        remember: int | None = None,
    ) -> None:
        self._target = target
        self._folder = Path(tempfile.mkdtemp(prefix="sqp-"))
        self._lock = threading.Lock()
        self._triggers: list[Trigger] = []
        self._pairs: list[_Pair] = []
        self._threads: list[threading.Thread] = []
        self._commands: deque[list[bytes]] = deque(maxlen=remember)
        self._open = True
        self._requests = Direction()
        self._replies = Direction()
        self.refusing = False
        self.refused = 0  # number of refused connections
        if tcp:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        else:
            path = self._folder / "proxy.sock"
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(str(path))
            self._listener.listen()
            self.url = f"unix://{quote(str(path))}"
        self._run(self._accept, "accept")

    @property
    def settings(self) -> config.Redis:
        return replace(config.Redis(), url=self.url)

    @property
    def commands(self) -> list[list[bytes]]:
        """The counted commands that have reached the server, in order."""
        with self._lock:
            return list(self._commands)

    @property
    def connections(self) -> int:
        """The number of connections accepted so far."""
        with self._lock:
            return len(self._pairs)

    def arm(
        self,
        fault: Fault,
        *,
        command: str = "",
        nth: int = 1,
        wanted: Callable[[list[bytes]], bool] | None = None,
    ) -> Trigger:
        """Arm a fault for the nth command from now on.

        A command counts if it has the name `command`, or if `wanted` returns True for it.
        """
        name = command.upper().encode()

        def by_name(arguments: list[bytes]) -> bool:
            return not name or arguments[0].upper() == name

        trigger = Trigger(fault, wanted or by_name, nth)
        with self._lock:
            self._triggers.append(trigger)
        return trigger

    def forge(self, reply: bytes, wanted: Callable[[list[bytes]], bool]) -> Trigger:
        """Replace the reply of each wanted command until the trigger is disarmed.

        `reply` is in RESP2.
        """
        trigger = Trigger(Fault.FORGE_REPLY, wanted, 1, forged=reply)
        with self._lock:
            self._triggers.append(trigger)
        return trigger

    def hold(self, *, requests: bool = False, replies: bool = False) -> None:
        """Block a direction, like a network that drops every packet.

        Data sent during this time is delivered late, after `heal`.
        """
        for direction, held in ((self._requests, requests), (self._replies, replies)):
            if held:
                direction.passes.clear()

    def heal(self) -> None:
        """Unblock both directions."""
        self._requests.passes.set()
        self._replies.passes.set()

    def cut_after(self, *, requests: int = -1, replies: int = -1) -> None:
        """Reset a connection after a number of further bytes in a direction.

        The bytes of all connections count. The last frame is cut at that byte. This happens once.
        """
        self._requests.left, self._replies.left = requests, replies

    @property
    def passed_bytes(self) -> tuple[int, int]:
        """The numbers of bytes of requests and of replies so far, over all connections."""
        return self._requests.count, self._replies.count

    def cut(self) -> None:
        """Reset every open connection."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            pair.reset()

    def deafen(self) -> None:
        """Accept no more data on the open connections, so that sending on them is an error.

        A client notices this only when it sends, and still gets replies. Not available with `tcp`.
        """
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            pair.deafen()

    def silence(self, name: str = "") -> int:
        """Silently drop all further data of the open connections. Return their number.

        New connections work. The server's side stays open, so blocked reads keep waiting. Only
        connections whose name contains `name` are affected.
        """
        with self._lock:
            pairs = [each for each in self._pairs if each.open and name in each.name]
        for pair in pairs:
            pair.silent = True
        return len(pairs)

    @contextlib.contextmanager
    def swallow_connections(self) -> Iterator[Callable[[], set[str]]]:
        """Reset all connections. New ones in the block lose all their data, permanently.

        Yield a function that returns the names of the connections whose login was lost.
        """
        since = len(self._pairs)
        self._requests.swallows = True
        self.cut()
        try:
            yield lambda: {each.name for each in self._pairs[since:] if each.silent} - {""}
        finally:
            self._requests.swallows = False

    def close(self) -> None:
        """Close all connections and stop all threads. Held commands are dropped."""
        self._open = False
        with self._lock:
            triggers, pairs = list(self._triggers), list(self._pairs)
        for pair in pairs:
            pair.abandoned = True
            pair.reset()
        for trigger in triggers:
            trigger.release()
        self.heal()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
            assert not thread.is_alive(), f"{thread.name} hangs"
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _run(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=f"proxy:{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while self._open:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refusing:
                self.refused += 1
                client.close()
                continue
            try:
                server = self._connect()
            except OSError:
                client.close()
                continue
            pair = _Pair(client, server, self._judge, self._requests, self._replies)
            with self._lock:
                self._pairs.append(pair)
            self._run(pair.pump_requests, "requests")
            self._run(pair.pump_replies, "replies")

    def _connect(self) -> socket.socket:
        if isinstance(self._target, tuple):
            return socket.create_connection(self._target, 10)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.connect(str(self._target))
        except OSError:
            server.close()
            raise
        return server

    def _judge(self, arguments: list[bytes]) -> Trigger | None:
        """Count a command, and return the trigger that it fires."""
        if arguments[0].upper() in _UNCOUNTED:
            return None
        chosen = None
        with self._lock:
            for trigger in self._triggers:
                if trigger.left > 0 and trigger.wanted(arguments):
                    if trigger.fault is Fault.FORGE_REPLY:
                        chosen = chosen or trigger
                        continue
                    trigger.left -= 1
                    if trigger.left == 0 and chosen is None:
                        chosen = trigger
            if chosen is None or chosen.fault is not Fault.CUT_BEFORE:
                self._commands.append(arguments)
        return chosen


@dataclass
class Direction:
    """One direction of all connections together."""

    count: int = 0  # number of bytes so far
    left: int = -1  # number of bytes until a connection is cut, -1 = never
    swallows: bool = False  # if True, a connection that sends data becomes silent
    passes: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.passes.set()

    def let_through(self, raw: bytes) -> tuple[bytes, bool]:
        """Wait while the direction is blocked. Return the part of a frame to forward.

        The second value is True if that is the whole frame.
        """
        self.passes.wait()
        with self.lock:
            size, cut = len(raw), 0 <= self.left < len(raw)
            if cut:
                size, self.left = self.left, -1
            elif self.left > 0:
                self.left -= size
            self.count += size
        return raw[:size], not cut


class _Pair:
    """A client's connection and its server connection, with a thread for each direction."""

    def __init__(
        self,
        client: socket.socket,
        server: socket.socket,
        judge: Callable[[list[bytes]], Trigger | None],
        requests: Direction,
        replies: Direction,
    ) -> None:
        self._requests, self._replies = requests, replies
        self._client = client
        self._server = server
        self._judge = judge
        self._expected: deque[Trigger | None] = deque()  # one for each outstanding reply
        self._mute = False
        self._deaf = False
        self.abandoned = False
        self.silent = False
        self.open = True
        self.name = ""  # as set by CLIENT SETNAME

    def reset(self) -> None:
        """Close both connections. The client sees a reset."""
        _wake_and_reset(self._client)
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)

    def deafen(self) -> None:
        """Accept no more data from the client, which notices this only when it sends."""
        self._deaf = True
        with contextlib.suppress(OSError):
            self._client.shutdown(socket.SHUT_RD)

    def pump_requests(self) -> None:
        """Forward commands to the server until either side closes."""
        with contextlib.suppress(OSError):
            for raw in _frames(self._client):
                arguments = _arguments(raw)
                if arguments[0].upper() == b"CLIENT" and arguments[1].upper() == b"SETNAME":
                    self.name = arguments[2].decode()
                self.silent = self.silent or self._requests.swallows
                if self.silent:
                    continue
                trigger = self._judge(arguments)
                if self.abandoned or (trigger is not None and not self._admit(trigger)):
                    return
                self._expected.append(trigger)
                passed, whole = self._requests.let_through(raw)
                self._server.sendall(passed)
                if not whole:
                    self.abandoned = True
                    self.reset()
                    return
        self.open = False
        if self._deaf or self.silent:
            return
        # The client has left, but the server may finish the commands that it has received.
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_WR)

    def pump_replies(self) -> None:
        """Forward replies to the client until the server closes, then close both sides."""
        with self._client, self._server:
            with contextlib.suppress(OSError):
                for raw in _frames(self._server):
                    trigger = self._expected.popleft() if self._expected else None
                    self._carry(raw, trigger)
            _wake_and_reset(self._client)

    def _carry(self, raw: bytes, trigger: Trigger | None) -> None:
        fault = None if trigger is None else trigger.fault
        if fault is Fault.CUT_REPLY:
            self._to_client(raw[: len(raw) // 2])
        if fault in (Fault.CUT_REPLY, Fault.DROP_REPLY, Fault.SWALLOW_REPLY):
            self._mute = True
        if fault in (Fault.CUT_REPLY, Fault.DROP_REPLY):
            self.reset()
        if trigger is not None:
            trigger.happened.set()
        if fault is Fault.HOLD_REPLY and trigger is not None:
            trigger.let_go.wait()
        if fault is Fault.CUT_AFTER:
            # This is set before the reply, because the client may send its next command before the
            # reset.
            self.abandoned = True
        self._to_client(trigger.forged if trigger and trigger.forged else raw)
        if fault is Fault.CUT_AFTER:
            self._mute = True
            self.reset()

    def _to_client(self, raw: bytes) -> None:
        passed, whole = self._replies.let_through(raw)
        try:
            if not (self._mute or self.silent):
                self._client.sendall(passed)
            if not whole:
                self._mute = True
                self.reset()
        except OSError:
            # The client has left. Further replies of the server are read and discarded, because
            # closing the connection now could drop commands that the server has not read yet.
            self._mute = True

    def _admit(self, trigger: Trigger) -> bool:
        """Apply the fault before the command is sent. Return False if the command is never sent."""
        if trigger.fault is Fault.CUT_BEFORE:
            trigger.happened.set()
            self.reset()
            return False
        if trigger.fault is Fault.HOLD_REQUEST:
            trigger.happened.set()
            trigger.let_go.wait()
        return not self.abandoned


def _wake_and_reset(sock: socket.socket) -> None:
    """Make closing the socket reset its connection, and wake the thread that reads it."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RD)


def _frames(sock: socket.socket) -> Iterator[bytes]:
    """Yield whole RESP2 frames as they arrive, unchanged."""
    buffer = b""
    while True:
        while (end := _frame_end(buffer, 0)) > 0:
            yield buffer[:end]
            buffer = buffer[end:]
        piece = sock.recv(_PIECE)
        if not piece:
            return
        buffer += piece


def _frame_end(buffer: bytes, start: int) -> int:
    """Return the end of the frame that starts at `start`, or 0 if the frame is incomplete."""
    line = buffer.find(b"\r\n", start)
    if line < 0:
        return 0
    kind, end = buffer[start : start + 1], line + 2
    if kind in b"+-:":
        return end
    size = int(buffer[start + 1 : line])
    if kind == b"$":
        end += size + 2 if size >= 0 else 0
        return end if end <= len(buffer) else 0
    assert kind == b"*", f"not a RESP2 frame: {buffer[start : start + 40]!r}"
    for _ in range(size):
        end = _frame_end(buffer, end)
        if not end:
            return 0
    return end


def _arguments(raw: bytes) -> list[bytes]:
    """Split a command's frame into its arguments."""
    arguments: list[bytes] = []
    at = raw.index(b"\r\n") + 2
    while at < len(raw):
        line = raw.index(b"\r\n", at)
        size = int(raw[at + 1 : line])
        arguments.append(raw[line + 2 : line + 2 + size])
        at = line + 2 + size + 2
    return arguments
