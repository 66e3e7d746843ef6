"""The peers of clients inside handlers: an echo over TLS, and over gRPC where it is installed.

    python -m tests.support.echo_peer FOLDER

FOLDER has the certificates of tests/support/tls.py. The program prints its ports as `TLS GRPC`,
where the second port is 0 if gRPC is missing. It then serves until it is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socketserver
import ssl
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from streamqd import process

try:
    import grpc
except ImportError:
    grpc = None

METHOD = "/echo.Echo/Say"


class Echo(socketserver.BaseRequestHandler):
    """Echoes the data it receives until the client disconnects."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while data := self.request.recv(4096):
                self.request.sendall(data)


class TlsServer(socketserver.ThreadingTCPServer):
    """A server that does the TLS handshake in the thread of each connection."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Echo)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / "server.pem", folder / "server.key")

    def finish_request(self, request: object, address: object) -> None:
        with (
            contextlib.suppress(OSError),
            self._context.wrap_socket(request, server_side=True) as secure,
        ):
            Echo(secure, address, self)

    def handle_error(self, request: object, address: object) -> None:
        """Ignore errors, because clients are expected to be killed."""


def serve_grpc() -> int:
    """Serve the echo in separate threads, and return the port."""
    if grpc is None:
        return 0
    method = grpc.unary_unary_rpc_method_handler(lambda request, _context: request)
    service, _, name = METHOD.strip("/").partition("/")
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {name: method}),)
    )
    port = int(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    kept.append(server)
    return port


kept: list[object] = []


def main(folder: str) -> None:
    """Serve both echoes until the process is killed."""
    process.die_with_parent(os.getppid())
    server = TlsServer(Path(folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], serve_grpc(), flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1])
