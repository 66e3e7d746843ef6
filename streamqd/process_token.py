"""Lease tokens that identify a process, so that other processes can find out if it has exited."""

from __future__ import annotations

import os
import secrets
import socket

import psutil

from streamqd.startup import boot_id


def new_token() -> str:
    """Return a token with the host, PID namespace, process ID, start time and a random part."""
    me = psutil.Process()
    return "|".join((socket.gethostname(), _space(), str(me.pid), _start(me), secrets.token_hex(4)))


def describe_holder(token: str) -> str:
    """Return a description of the process that holds a token."""
    parts = token.split("|")
    return f"process {parts[2]} on {parts[0]}" if len(parts) == 5 else token


def is_gone(token: str) -> bool:
    """Return True if the process that created a token has exited.

    For a process of another host, PID namespace or boot, the result is always False.
    """
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
    """Return the boot ID and the PID namespace, which distinguish hosts with the same name."""
    try:
        return f"{boot_id()}:{os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 - not a path
    except OSError:
        return "unknown"
