"""Forks and reaps child processes, and handles their signals, titles and the parent's death.

This module does not depend on Redis or messages. The supervisor forks from its only thread. In the
child, therefore, no lock can be held by a thread that does not exist there. PDEATHSIG also works,
because the kernel sends it when the thread that forked exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import fcntl
import io
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import setproctitle

from streamqd import fork_hygiene

CROWDED_SECONDS = 0.02  # seconds between polls if poll(2) does not accept all descriptors
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGTSTP,
    signal.SIGCONT,
    signal.SIGCHLD,
)
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)

_BLOCKED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGTSTP, signal.SIGUSR1)

_libc = ctypes.CDLL(None, use_errno=True)
_tgkill = getattr(_libc, "tgkill", None)  # needs glibc 2.30 or later


# A thread that receives the first signal writes its own stack, even in the middle of C code. All
# other processes and programs ignore this signal. After the second signal, the main thread writes
# the stacks of all threads between two bytecodes. A single signal for both, chained by
# faulthandler, would nest without limit: a burst of about ten such signals overflowed the signal
# stack and killed the worker.
STACK_OF_THREAD = signal.SIGURG
STACKS_OF_ALL = signal.SIGUSR2

FAILURE_PREFIX = b"failed: "  # prefix of the reason that a child sends if it cannot start
FAILURE_BYTES_MAX = 2000
STACK_BYTES = 64 * 1024  # maximum size of a child's stacks until `take_stack` reads them
MESSAGES_MAX = 64  # maximum messages read from a dead child, as its own children may still send


@dataclass
class Child:
    """A forked process of this daemon. `pidfd` becomes readable when the process dies."""

    pid: int
    pidfd: int
    control: socket.socket
    title: str
    stacks: int  # descriptor of the memory to which its fault handler writes
    stack_seen: int = 0  # bytes of stacks at the last call of `poll_stack`
    peak_rss: int = 0  # in bytes, 0 until the child is reaped
    last_message_at: float = 0.0  # time of its last control message, monotonic
    control_closed_at: float = (
        0.0  # time at which its end of the control socket was found closed, monotonic
    )
    problem: str = ""  # the reason why it cannot start, if it has sent one
    collected: Exit | None = None  # its exit, after which pid and pidfd may be reused

    def send(self, message: bytes) -> None:
        """Send a control message. Never raises.

        If the child cannot receive it, the message is lost. `drain` notices if the child has closed
        its end of the socket.
        """
        with contextlib.suppress(OSError):
            self.control.send(message, socket.MSG_DONTWAIT)

    def drain(self) -> bool:
        """Read one control message from the child. Return False if there was none.

        Most messages only announce that the scoreboard has changed.
        """
        try:
            message = self.control.recv(4096, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            message = b""
        if message:
            self.last_message_at = time.monotonic()
        if message.startswith(FAILURE_PREFIX):
            self.problem = message.removeprefix(FAILURE_PREFIX).decode("utf-8", "replace")
        if not message and not self.control_closed_at:
            # The child has closed its end, probably because it is about to exit. Even if it keeps
            # running, it can receive no more messages.
            self.control_closed_at = time.monotonic()
        return bool(message)

    def kill_group(self) -> None:
        """Kill the child and its process group.

        Once the child has been reaped, this does nothing.
        """
        if self.collected is None:
            kill_group(self.pid)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child, but not to its process group."""
        if self.collected is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def ask_stack(self, thread: int) -> None:
        """Make a thread of the child write its stack. `poll_stack` then returns it."""
        if self.collected is None and _tgkill is not None:
            _tgkill(self.pid, thread, int(STACK_OF_THREAD))

    def ask_stacks(self) -> None:
        """Make the main thread of the child write its stack, and then all other threads theirs.

        The main thread can write its stack even while C code holds the interpreter. The stacks of
        the other threads follow once the main thread has left that code.
        """
        self.signal(STACK_OF_THREAD)
        self.signal(STACKS_OF_ALL)

    def reap(self) -> Exit | None:
        """Collect the child if it is dead. Return None while it is running. May be repeated."""
        if self.collected is None:
            self.collected = self._collect()
        if self.collected is None or self.control.fileno() < 0:
            return self.collected
        stack = self.take_stack()
        for _ in range(MESSAGES_MAX):
            if not self.drain():
                break
        self.control.close()
        os.close(self.stacks)
        problem = self.problem if self.collected.signal is None else ""
        self.collected = self.collected._replace(problem=problem, stack=stack)
        return self.collected

    def _collect(self) -> Exit | None:
        result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return None
        # The programs that the child started are killed before the zombie is collected, because its
        # process group ID may be reused afterwards.
        self.kill_group()
        self.peak_rss = os.wait4(self.pid, 0)[2].ru_maxrss * 1024
        os.close(self.pidfd)
        exited = result.si_code == os.CLD_EXITED
        return Exit(result.si_status, None) if exited else Exit(None, result.si_status)

    def poll_stack(self) -> str:
        """Return the new stacks, or '' if there are none or the child is still writing them.

        They count as complete if they have not grown since the previous call.
        """
        before, self.stack_seen = self.stack_seen, os.lseek(self.stacks, 0, os.SEEK_CUR)
        # If the stacks are still growing, they are incomplete, so leave them for the next call.
        return self.take_stack() if before == self.stack_seen > 0 else ""

    def take_stack(self) -> str:
        """Return the stacks written since the last call, or '' if there are none, and clear them.

        The fault handlers of the child and of the processes that it forked have written them.
        """
        # The child shares this file offset. The memory is filled with zeros, because the next stack
        # may be shorter.
        size = os.lseek(self.stacks, 0, os.SEEK_CUR)
        if not size:
            return ""
        text = os.pread(self.stacks, size, 0).rstrip(b"\0")
        os.pwrite(self.stacks, bytes(size), 0)
        os.lseek(self.stacks, 0, os.SEEK_SET)
        self.stack_seen = 0
        return text.decode("utf-8", "backslashreplace")


class Exit(NamedTuple):
    """The exit of a child. Exactly one of `code` and `signal` is set."""

    code: int | None
    signal: int | None
    out_of_memory: bool = False  # True if the kernel killed it because of a lack of memory
    problem: str = ""  # the reason why it could not start, if it has sent one
    stack: str = ""  # stacks that its fault handler has written

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.code}"
        return f"signal {self.signal_name}" + (", out of memory" if self.out_of_memory else "")

    @property
    def signal_name(self) -> str:
        """The name of the signal, such as SIGKILL, or '' if no signal killed the child."""
        try:
            return signal.Signals(self.signal).name if self.signal is not None else ""
        except ValueError:
            return str(self.signal)


def spawn(
    run: Callable[[socket.socket], int],
    *,
    title: str,
    forget: Iterable[Callable[[], None]] = (),
    keep: Iterable[int] = (),
    on_parent_death: Callable[[], None] | None = None,
) -> Child:
    """Fork a child that runs `run(control)` and exits with its result.

    `forget` contains the `detach` methods of all connections of the parent. The child calls them
    first, so that no cleanup in the child can use the parent's sockets. `keep` lists file
    descriptors that stay open, in addition to the standard ones and the control socket. If the
    parent dies, the child calls `on_parent_death` and exits. If `on_parent_death` is None, the
    kernel kills the child instead. Raises RuntimeError if the parent has more than one thread, and
    OSError if the operating system cannot create the child.
    """
    if threading.active_count() != 1:
        names = ", ".join(thread.name for thread in threading.enumerate()[1:])
        raise RuntimeError(
            f"the supervisor must be single-threaded to fork, but it has more threads: {names}"
        )
    stacks = _memory_for_stacks()
    try:
        parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:
        os.close(stacks)
        raise
    parent_pid = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    fork_hygiene.before_fork()
    # Signals are blocked until the child has set its own handlers. Otherwise, the parent's handlers
    # would run in the child.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            keep = [stacks, *keep]
            _child(
                run, title, parent_pid, parent_end, child_end, stacks, forget, keep, on_parent_death
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    child_end.close()
    # Both the parent and the child set the process group. As a result, a later killpg cannot reach
    # the supervisor, whichever of them runs first.
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    parent_end.setblocking(False)
    try:
        return Child(pid, os.pidfd_open(pid), parent_end, title, stacks)
    except OSError:
        # The child is killed, because it is not registered. Otherwise, it would keep working with a
        # token that the next child also gets.
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        parent_end.close()
        os.close(stacks)
        raise


def started_at(pid: int) -> float:
    """Return the start time of a process in Unix seconds.

    Raises OSError if the process does not exist.

    Source: /proc/PID/stat, in clock ticks since the host booted.
    """
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    ticks = int(stat.rpartition(b") ")[2].split()[19])  # field 22, while the first here is field 3
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted + ticks / os.sysconf("SC_CLK_TCK")


def _memory_for_stacks() -> int:
    """Return the file descriptor of a memory file that cannot grow beyond STACK_BYTES.

    The fault handler of a child writes to this file. It cannot use standard error, which is a log
    with one record per line. The kernel allocates a page of the file only when it is first written
    to.
    """
    descriptor = os.memfd_create("stacks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, STACK_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _child(
    run: Callable[[socket.socket], int],
    title: str,
    parent_pid: int,
    parent_end: socket.socket,
    child_end: socket.socket,
    stacks: int,
    forget: Iterable[Callable[[], None]],
    keep: Iterable[int],
    on_parent_death: Callable[[], None] | None,
) -> None:
    code = 1
    try:
        for detach in forget:
            detach()
        parent_end.detach()
        os.setpgid(0, 0)
        _reset_signals()
        if on_parent_death is None:
            die_with_parent(parent_pid)
        else:
            _call_on_parent_death(parent_pid, on_parent_death)
        _close_all_but({0, 1, 2, child_end.fileno(), *keep})
        devnull = os.open(os.devnull, os.O_RDONLY)
        os.dup2(devnull, 0)
        os.close(devnull)
        _tolerate_closed_output()
        fork_hygiene.limit_environment()
        with contextlib.suppress(OSError):
            fork_hygiene.prefer_as_oom_victim()
        set_title(title)
        _write_stacks_to(stacks)
        code = run(child_end)
    except BaseException as error:  # noqa: BLE001 - this is the last frame of the process
        # If logging is configured, this writes to the log.
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


class _Output(io.FileIO):
    """A standard stream whose writes never fail. Text that cannot be written is lost."""

    def write(self, data: Any, /) -> int:
        written = None  # stays None after an error, or if a non-blocking pipe is full
        with contextlib.suppress(OSError):
            written = super().write(data)
        return memoryview(data).nbytes if written is None else written


def _tolerate_closed_output() -> None:
    """Keep a handler's `print` from failing if the reader of the output has exited.

    Otherwise, with `streamqd | head -2`, every message whose handler prints would fail.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        if old is None:
            continue  # the stream was already closed when the daemon was started
        # If PYTHONUNBUFFERED is set, as in the systemd unit, each `print` is written immediately.
        unbuffered = bool(getattr(old, "write_through", False))
        with contextlib.suppress(OSError):
            output = _Output(descriptor, "w", closefd=False)
            new = io.TextIOWrapper(
                output if unbuffered else io.BufferedWriter(output),
                encoding=getattr(old, "encoding", None) or "utf-8",
                errors=getattr(old, "errors", None),
                line_buffering=bool(getattr(old, "line_buffering", True)),
                write_through=unbuffered,
            )
            setattr(sys, name, new)
            setattr(sys, f"__{name}__", new)


def _write_stacks_to(descriptor: int) -> None:
    """Write stacks to a file after a crash, and when the signals of `Child.ask_stacks` arrive.

    It is not safe to read the stack of a thread that is running, so the handler in C, which can run
    at any time, reads only the stack of its own thread. The handler in Python can read all stacks:
    it runs while the main thread holds the interpreter, so no other thread is running then.
    """

    def show_all(_number: int, _frame: object) -> None:
        if threading.active_count() > 1:  # the main thread has already written its own stack
            faulthandler.dump_traceback(descriptor, all_threads=True)

    faulthandler.enable(descriptor)
    faulthandler.register(STACK_OF_THREAD, descriptor, all_threads=False)
    signal.signal(STACKS_OF_ALL, show_all)
    signal.siginterrupt(STACKS_OF_ALL, False)


def kill_group(pid: int) -> None:
    """Kill a process and all others in its process group. If it does not exist, do nothing."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    # A terminal's Ctrl-C and a service manager's TERM reach all processes of the daemon, but
    # children must obey only the supervisor. They handle these signals with a function that does
    # nothing. If they ignored them, every program that a handler starts would inherit SIG_IGN and
    # could not be terminated. In a process that a handler forks without exec, the default actions
    # are restored before any signal arrives.
    for number in _BLOCKED_SIGNALS:
        signal.signal(number, _ignore_signal)
        signal.siginterrupt(number, False)
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED_SIGNALS),
        after_in_child=_restore_signals,
    )
    for number in (signal.SIGQUIT, signal.SIGCHLD, signal.SIGCONT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _restore_signals() -> None:
    for number in _BLOCKED_SIGNALS:
        if signal.getsignal(number) is _ignore_signal:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED_SIGNALS)


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent dies. Exit if it has already died."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def _call_on_parent_death(parent_pid: int, on_parent_death: Callable[[], None]) -> None:
    def end(_number: int, _frame: object) -> None:
        if os.getppid() == parent_pid:
            return  # another process sent it to all processes of the daemon
        try:
            on_parent_death()
        finally:
            os._exit(1)

    signal.signal(signal.SIGUSR1, end)
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGUSR1), 0, 0, 0)
    if os.getppid() != parent_pid:
        end(0, None)


def is_orphaned(control: socket.socket) -> bool:
    """Return True if the parent is gone. Call this only in a child.

    The parent keeps the other end of `control` open until it has reaped the child.
    """
    try:
        return not control.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def become_subreaper() -> None:
    """Make this process adopt the orphans of its children, so that it can reap them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_adopted(known: set[int]) -> None:
    """Collect adopted processes that are dead. Children in `known` are left to their own `reap`."""
    while True:
        try:
            result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if result is None or result.si_pid in known:
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(result.si_pid, os.WNOHANG)


def _close_all_but(kept: set[int]) -> None:
    low = 0
    for descriptor in sorted(kept):
        if low < descriptor:
            os.closerange(low, descriptor)
        low = descriptor + 1
    limit = os.sysconf("SC_OPEN_MAX")
    os.closerange(low, limit if limit > low else low + 4096)


def set_title(title: str) -> None:
    """Set the title of this process in ps and top."""
    setproctitle.setproctitle(title)


class SignalQueue:
    """A queue of received signals, which the process takes when it is ready to handle them.

    Python writes the number of each signal to a pipe, from which the queue reads it. The signal
    handlers themselves do nothing.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._waiting: list[signal.Signals] = []
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        for number in SIGNALS:
            signal.signal(number, _ignore_signal)
        # This signal is ignored, because `report.dump` may send it to a child that has not
        # registered its handler yet.
        signal.signal(STACKS_OF_ALL, signal.SIG_IGN)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def fileno(self) -> int:
        """Return the file descriptor that is readable while a signal is waiting."""
        return self._reader

    def take(self) -> list[signal.Signals]:
        """Return the signals received since the last call, in order, but with SIGCONT last.

        If signals arrive together, the operating system runs the handler of the later one first, so
        their order is not reliable. If a pause and a SIGCONT arrive together, SIGCONT takes effect.
        """
        self._fill()
        taken, self._waiting = self._waiting, []
        return sorted(taken, key=lambda number: number is signal.SIGCONT)

    def stop_waits(self) -> bool:
        """Return True if a signal to stop has arrived and has not been taken yet."""
        self._fill()
        return any(number in STOPPING for number in self._waiting)

    def _fill(self) -> None:
        with contextlib.suppress(BlockingIOError):
            raw = os.read(self._reader, 4096)
            self._waiting += [signal.Signals(number) for number in raw]

    def close(self) -> None:
        """Restore the previous signal handlers."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)


def _ignore_signal(_number: int, _frame: object) -> None:
    return None


def wait_readable(descriptors: Iterable[int], seconds: float) -> list[int]:
    """Wait up to `seconds` for a file descriptor to become readable. Return all that are."""
    wanted = list(descriptors)
    try:
        return _wait_readable(wanted, seconds)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # More descriptors are open than the limit now allows, because it was lowered after they were
    # opened.
    time.sleep(min(max(0.0, seconds), CROWDED_SECONDS))
    return [found for each in wanted for found in _wait_readable([each], 0.0)]


def _wait_readable(descriptors: list[int], seconds: float) -> list[int]:
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poller.poll(max(0.0, seconds) * 1000)]
