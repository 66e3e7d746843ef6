"""The private servers of the comparison."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import redis

from streamqd.embedded import find_server
from tests.support import fetch_server


@contextlib.contextmanager
def start_private_server(name: str = "") -> Iterator[tuple[int, int, str]]:
    """Run a server without persistence on a free port. Yield its port, its pid and its version.

    `name` is a binary of fetch_server.py, or '' for the server that streamqd embeds.
    """
    program = fetch_server.fetch(name) if name else find_server()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [str(program), "--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
        command += ["--save", "", "--appendonly", "no"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield port, process.pid, _version(port)
        finally:
            process.terminate()
            process.wait()


def _version(port: int) -> str:
    client = redis.Redis(port=port)
    deadline = time.monotonic() + 10
    while True:
        try:
            info: Any = client.info("server")
            return f"{info.get('server_name', 'redis')} {_number(info)}"
        except redis.ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _number(info: dict[str, Any]) -> str:
    return str(info.get("valkey_version", info["redis_version"]))
