"""A handler with resources that do not survive forks: threads, TLS and gRPC clients, a child.

The handler never closes any of them, so streamqd has to clean up after a worker. PEER in the
environment names the ports of tests/support/echo_peer.py and its folder.
"""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Any

from streamqd import Context, Message
from tests.support.echo_peer import METHOD, grpc
from tests.support.ledger import Ledger

ledger = Ledger.from_environment()
tls_port, grpc_port, folder = os.environ["PEER"].split(" ", 2)
secure: ssl.SSLSocket
say: Any = None


def on_start(_context: Context) -> None:
    """Open all resources, in the worker."""
    global secure, say
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    threading.Thread(target=busy, daemon=True).start()
    trust = ssl.create_default_context(cafile=str(Path(folder) / "ca.pem"))
    plain = socket.create_connection(("127.0.0.1", int(tls_port)))
    secure = trust.wrap_socket(plain, server_hostname="127.0.0.1")
    if int(grpc_port):
        channel = grpc.insecure_channel(f"127.0.0.1:{grpc_port}")
        say = channel.unary_unary(METHOD)


def busy() -> None:
    """Take and release locks of the allocator and the interpreter forever."""
    pause = threading.Event()
    while not pause.wait(0.02):
        hashlib.sha256(b"x" * 10_000).digest()


def handle(message: Message) -> None:
    """Call both peers, and sometimes leave a process running."""
    with ledger.run(message):
        secure.sendall(message.payload)
        assert secure.recv(4096) == message.payload
        if say is not None:
            assert say(message.payload, timeout=30) == message.payload
        if message.text().endswith("spawn"):
            subprocess.Popen(["sleep", "600"])
