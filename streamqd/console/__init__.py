"""The web console. `streamqd console` runs it as a separate process.

The daemons do not depend on the console. It reads and changes data in Redis only through the
functions of `streamqd.admin`, as the commands do. Only its own command imports it, because it
requires the extra `console`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Callable

import uvicorn

from streamqd import config, logs
from streamqd.console.access import ConsoleAccess, check_listening, make_access
from streamqd.console.app import ConsoleApp
from streamqd.console.backend import ArchiveLook, Backend
from streamqd.errors import RequestRefusedError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
STOP_SECONDS = 2  # seconds that running requests may take to finish at the exit
WATCH_SECONDS = 0.2


def run(settings: config.Settings, say: Callable[[str], None], find_in_archive: ArchiveLook) -> int:
    """Serve the console until SIGTERM or SIGINT, and then return 0.

    `say` is called with the lines to print, such as the address. `find_in_archive` searches the
    configured archive. Raises RequestRefusedError if the console cannot or may not listen on its
    address.
    """
    check_listening(settings.console)
    with _listening(settings.console) as listener:
        port = listener.getsockname()[1]
        access = make_access(settings.console, port)
        logs.setup(role="console", style=settings.log.format, level=settings.log.level)
        backend = Backend(settings, find_in_archive)
        try:
            asyncio.run(_serve(settings, access, backend, listener, say))
        finally:
            backend.close()
            logs.close()
    return 0


def _listening(console: config.Console) -> socket.socket:
    """Return a socket that listens on the configured address. Raises RequestRefusedError."""
    host, port = console.address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=256)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise RequestRefusedError(
                f"console.bind {console.bind} is in use by another process; pass --port 0 for a"
                " free port"
            ) from None
        raise RequestRefusedError(
            f"console.bind {console.bind} cannot be used ({error.strerror})"
        ) from None


def _address(console: config.Console, port: int) -> str:
    """Return the URL with which a browser on this host opens the console."""
    host = console.address[0]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104 - a comparison
    return f"http://{f'[{shown}]' if ':' in shown and shown[0] != '[' else shown}:{port}"


async def _serve(
    settings: config.Settings,
    access: ConsoleAccess,
    backend: Backend,
    listener: socket.socket,
    say: Callable[[str], None],
) -> None:
    base = _address(settings.console, listener.getsockname()[1]) + settings.console.prefix

    def announce() -> None:
        say(
            f"console: {base}?token={access.new_token()}"
            if access.logs_in_by_link
            else f"console: {base}"
        )

    console = ConsoleApp(settings, access, backend, announce)
    server = uvicorn.Server(
        uvicorn.Config(
            console.app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=STOP_SECONDS,
        )
    )

    def stop(*_: object) -> None:
        server.should_exit = True

    # uvicorn replaces these handlers while it runs, restores them when it stops, and then raises
    # the signals that it received again. Without these handlers, such a signal would then kill the
    # process.
    for each in STOP_SIGNALS:
        signal.signal(each, stop)
    announce()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not serving.done():
        await asyncio.wait([serving], timeout=WATCH_SECONDS)
        if server.should_exit:
            console.hub.close()
    with contextlib.suppress(asyncio.CancelledError):
        await serving
