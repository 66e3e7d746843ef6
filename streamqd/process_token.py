"""Tokens of leases that name their process, so that another one can prove that it has exited."""

from __future__ import annotations

import os
import secrets
import socket

import psutil

from streamqd.startup import boot_id


def new_token() -> str:
    """Host, process space, process and its start, and chance."""
    me = psutil.Process()
    return "|".join((socket.gethostname(), _space(), str(me.pid), _start(me), secrets.token_hex(4)))


def holder_of(token: str) -> str:
    """Return the holder of a token in words."""
    parts = token.split("|")
    return f"process {parts[2]} on {parts[0]}" if len(parts) == 5 else token


def is_gone(token: str) -> bool:
    """True if the process of a token has exited. Known only for processes of this host."""
    parts = token.split("|")
    if len(parts) != 5 or parts[:2] != [socket.gethostname(), _space()]:
        return False
    try:
        process = psutil.Process(int(parts[2]))
        return _start(process) != parts[3] or process.status() == psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, ValueError):
        return True


def _start(process: psutil.Process) -> str:
    return f"{process.create_time():.2f}"


def _space() -> str:
    """Return what distinguishes this host's processes from a container's of the same name."""
    try:
        return f"{boot_id()}:{os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 - it is not a path
    except OSError:
        return "unknown"
