"""Child processes start, exit and inherit, and other processes die with them."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamqd import process
from streamqd.process import Child, Exit, SignalQueue
from tests.support.waiting import wait_until

Start = Callable[..., Child]
# These are the signals that a terminal, a service manager or an operator may send to all processes
# of a daemon.
SUPERVISORS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGTSTP),
    *(signal.SIGUSR1, signal.SIGCONT, signal.SIGWINCH),
)


@pytest.fixture
def spawn() -> Iterator[Start]:
    """A function that starts children. Those that remain are killed after the test."""
    children: list[Child] = []

    def start(run: Callable[[socket.socket], int], **options: object) -> Child:
        children.append(process.spawn(run, title="test: child", **options))  # type: ignore[arg-type]
        return children[-1]

    yield start
    for child in children:
        if child.control.fileno() >= 0:  # the test has not closed it yet
            child.kill_group()
            process.wait_readable([child.pidfd], 10.0)
            child.reap()


def wait_exit(child: Child) -> Exit:
    assert process.wait_readable([child.pidfd], 10.0) == [child.pidfd], "it does not end"
    exit_ = child.reap()
    assert exit_ is not None
    return exit_


def receive(child: Child) -> bytes:
    """Return the next message of the child, or b'' if it has exited."""
    assert process.wait_readable([child.control.fileno()], 10.0), "it says nothing"
    return child.control.recv(65536)


def park(_control: socket.socket) -> int:
    while True:
        signal.pause()


def echo(control: socket.socket) -> int:
    """Report that the setup is done, answer once, and then wait forever."""
    control.send(b"up")
    control.send(control.recv(100))
    return park(control)


def spawn_parked(spawn: Start, **options: object) -> Child:
    """Return a child that has reported that its setup is done, and now waits forever."""

    def run(control: socket.socket) -> int:
        control.send(b"up")
        return park(control)

    child = spawn(run, **options)
    assert receive(child) == b"up"
    return child


# --- exit status ----------------------------------------------------------------------------------


def test_child_exits_with_the_returned_code(spawn: Start):
    assert wait_exit(spawn(lambda _: 5)) == Exit(5, None)


def test_child_exits_with_1_after_an_exception(spawn: Start, capfd, monkeypatch):
    monkeypatch.setattr(sys, "stderr", os.fdopen(2, "w", closefd=False))  # as without pytest

    def run(_control: socket.socket) -> int:
        raise ValueError("out of the blue")

    assert wait_exit(spawn(run)) == Exit(1, None)
    assert "ValueError: out of the blue" in capfd.readouterr().err


def test_start_time_of_a_process_is_in_unix_seconds(spawn: Start):
    tick = 1 / os.sysconf("SC_CLK_TCK")
    before = time.time()
    child = spawn(lambda control: len(control.recv(1)))
    after = time.time()

    assert before - tick <= process.started_at(child.pid) <= after + tick


def test_start_time_of_a_missing_process_raises(spawn: Start):
    child = spawn(lambda _: 0)
    process.wait_readable([child.pidfd], 10.0)
    child.reap()

    with pytest.raises(OSError, match="No such file"):
        process.started_at(child.pid)


def test_signal_is_distinguished_from_an_exit_code(spawn: Start):
    child = spawn_parked(spawn)
    assert child.reap() is None, "it lives"
    child.signal(signal.SIGKILL)
    assert wait_exit(child) == Exit(None, signal.SIGKILL)


def test_exit_status_is_described_in_words():
    assert str(Exit(3, None)) == "exit code 3"
    assert str(Exit(None, signal.SIGSEGV)) == "signal SIGSEGV"
    assert str(Exit(None, 99)) == "signal 99"


def test_messages_and_signals_to_a_dead_child_are_ignored(spawn: Start):
    child = spawn(lambda _: 0)
    process.wait_readable([child.pidfd], 10.0)
    for _ in range(3):
        child.send(b"stop")
        child.kill_group()
        child.signal(signal.SIGUSR1)
        child.drain()
    assert child.reap() == Exit(0, None)


# --- deaths of parents and children ---------------------------------------------------------------


def child_pids(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.fault("F37")
def test_descendants_exit_with_their_child(spawn: Start):
    def run(control: socket.socket) -> int:
        if os.fork() == 0:
            control.send(str(os.getpid()).encode())
            return park(control)
        return park(control)

    child = spawn(run)
    grandchild = int(receive(child))
    assert child_pids(child.pid) == [grandchild]
    child.signal(signal.SIGKILL)
    wait_exit(child)
    wait_until(lambda: not is_alive(grandchild), what="the grandchild is gone")


def test_child_has_its_own_process_group(spawn: Start):
    child = spawn_parked(spawn)
    assert os.getpgid(child.pid) == child.pid != os.getpgrp()


def test_child_exits_with_its_parent(spawn: Start):
    def run(control: socket.socket) -> int:
        inner = process.spawn(park, title="test: inner", keep=[control.fileno()])
        control.send(str(inner.pid).encode())
        return park(control)

    child = spawn(run)
    inner = int(receive(child))
    assert is_alive(inner)
    os.kill(child.pid, signal.SIGKILL)  # only the process in the middle, not its group
    wait_until(lambda: not is_alive(inner), what="the inner one is gone")


def test_parent_exit_differs_from_an_ordinary_signal(spawn: Start):
    """The exit of a parent is not taken for an ordinary signal.

    The kernel reports it with SIGUSR1, which an operator may also send.
    """

    def run(control: socket.socket) -> int:
        def duty() -> None:
            control.send(b"on_parent_death")

        child = process.spawn(
            echo, title="test: inner", keep=[control.fileno()], on_parent_death=duty
        )
        child.control.setblocking(True)
        said = [child.control.recv(100)]
        for number in SUPERVISORS:
            child.signal(number)
        child.send(b"here")
        said.append(child.control.recv(100))
        control.send(b" ".join(said))
        return park(control)

    child = spawn(run)
    assert receive(child) == b"up here"
    os.kill(child.pid, signal.SIGKILL)
    assert receive(child) == b"on_parent_death"


def test_child_of_a_dead_parent_exits_immediately(spawn: Start):
    def run(_control: socket.socket) -> int:
        process.die_with_parent(parent_pid=1 if os.getppid() != 1 else 2)
        return 7

    assert wait_exit(spawn(run)) == Exit(1, None)


# --- inheritance ----------------------------------------------------------------------------------


@pytest.mark.fault("F33")
def test_child_closes_other_file_descriptors(spawn: Start):
    kept, other = os.pipe()
    os.set_inheritable(other, True)
    try:

        def run(control: socket.socket) -> int:
            listed = list(Path("/proc/self/fd").iterdir())  # opens a descriptor and closes it
            control.send(",".join(one.name for one in listed if one.exists()).encode())
            control.send(str(control.fileno()).encode())
            return 0

        child = spawn(run, keep=[kept])
        open_ = {int(one) for one in receive(child).split(b",")}
        control = int(receive(child))
        (stacks,) = open_ - {0, 1, 2, kept, control}
        assert os.path.sameopenfile(stacks, child.stacks)
    finally:
        os.close(kept)
        os.close(other)


def test_child_detaches_connections_first(spawn: Start):
    """A child detaches its connections, because closing one would write to the parent's socket."""
    ours, theirs = socket.socketpair()
    order: list[str] = []

    def forget() -> None:
        order.append("forgotten")
        ours.detach()

    def run(control: socket.socket) -> int:
        control.send(f"{order} {ours.fileno()}".encode())
        return 0

    child = spawn(run, forget=[forget])
    assert receive(child) == b"['forgotten'] -1"
    wait_exit(child)
    assert order == [], "not in the parent"
    ours.send(b"still open")
    assert theirs.recv(100) == b"still open"
    ours.close()
    theirs.close()


def test_child_does_not_inherit_supervisor_state(spawn: Start, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/notify")
    monkeypatch.setenv("WATCHDOG_USEC", "1")
    monkeypatch.setenv("MINE", "1")

    def run(control: socket.socket) -> int:
        names = [name for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "MINE") if name in os.environ]
        score = Path("/proc/self/oom_score_adj").read_text().strip()
        control.send(f"{names} {score}".encode())
        return 0

    assert receive(spawn(run)) == b"['MINE'] 500"


def test_child_has_an_empty_standard_input(spawn: Start):
    def run(control: socket.socket) -> int:
        control.send(b"[" + os.read(0, 10) + b"]")
        return 0

    assert receive(spawn(run)) == b"[]"


def test_programs_started_by_a_child_can_be_terminated(spawn: Start):
    """A program that a child starts can be terminated.

    A signal that the child ignores would stay ignored in the program.
    """

    def run(control: socket.socket) -> int:
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        fork = os.fork()
        if not fork:
            park(control)
        os.kill(fork, signal.SIGTERM)
        ends = program.wait(10), os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
        control.send(str(ends).encode())
        return 0

    child = spawn(run)
    assert receive(child) == b"(-15, -15)"
    assert wait_exit(child) == Exit(0, None)


def test_child_ignores_signals_of_the_supervisor(spawn: Start):
    signals = SignalQueue()
    try:
        child = spawn(echo)
        assert receive(child) == b"up"
        for number in SUPERVISORS:
            child.signal(number)
        assert signals.take() == [], "and the child's signals do not reach the parent"
        child.send(b"here")
        assert receive(child) == b"here", "it lives"
        child.signal(signal.SIGQUIT)
        assert wait_exit(child) == Exit(None, signal.SIGQUIT)
        readable, _, _ = select.select([signals], [], [], 10.0)
        assert readable
        assert signals.take() == [signal.SIGCHLD]
    finally:
        signals.close()


def test_stacks_are_dumped_while_threads_start_and_exit(spawn: Start):
    """Stacks are dumped safely.

    Reading the stack of a running thread may crash, so a request could otherwise kill a worker.
    """

    def churn() -> None:
        while True:
            some = [threading.Thread(target=json.dumps, args=([1] * 50,)) for _ in range(5)]
            for one in some:
                one.start()
            for one in some:
                one.join()

    def run(control: socket.socket) -> int:
        for _ in range(3):
            threading.Thread(target=churn, daemon=True).start()
        control.send(b"up")
        while True:
            control.send(control.recv(100))

    child = spawn(run)
    assert receive(child) == b"up"
    for _ in range(300):
        child.ask_stacks()
        child.send(b"here")
        assert receive(child) == b"here", f"{child.reap()}"
    shown = child.take_stack()
    assert "in run" in shown
    assert "in churn" in shown
    assert (
        "Stack (most recent" in shown
    )  # only one thread's stack, because the signal handler looks at no other


def test_stack_dump_is_bounded_and_read_once(spawn: Start, capfd):
    """The dump does not go to standard error, where each line must be a record.

    A burst of requests is harmless, because it cannot overflow the signal stack and kill the child.
    """

    def run(control: socket.socket) -> int:
        control.send(b"up")
        control.recv(1)
        ctypes.string_at(0)
        return 0

    child = spawn(run)
    assert receive(child) == b"up"
    assert child.poll_stack() == ""
    for _ in range(300):  # more than the buffer holds
        child.ask_stacks()
    wait_until(lambda: (found := child.poll_stack()) and "in run" in found, what="a stack")
    child.send(b"x")
    found = wait_until(child.reap, what="it crashes")
    assert found.signal == signal.SIGSEGV
    assert "Segmentation fault" in found.stack
    assert len(found.stack) <= process.STACK_BYTES
    assert capfd.readouterr().err == ""


@pytest.mark.fault("F33")
def test_fork_is_refused_with_running_threads():
    leave = threading.Event()
    other = threading.Thread(target=leave.wait, name="pool-1")
    other.start()
    try:
        with pytest.raises(RuntimeError, match="pool-1"):
            process.spawn(park, title="test: never")
    finally:
        leave.set()
        other.join()


# --- signals and orphans --------------------------------------------------------------------------


def test_resume_wins_over_a_simultaneous_pause():
    signals = SignalQueue()
    try:
        for number in (signal.SIGCONT, signal.SIGHUP, signal.SIGTSTP):
            signal.raise_signal(number)
        assert signals.take() == [signal.SIGHUP, signal.SIGTSTP, signal.SIGCONT]
    finally:
        signals.close()


def test_signals_are_queued_and_handlers_restored():
    before = signal.getsignal(signal.SIGHUP)
    signals = SignalQueue()
    try:
        assert signals.take() == []
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
        assert signals.take() == [signal.SIGHUP, signal.SIGTERM, signal.SIGHUP]
        assert signals.take() == []
    finally:
        signals.close()
    assert signal.getsignal(signal.SIGHUP) is before


def test_reaping_orphans_leaves_own_children_alone(spawn: Start):
    """Reaping orphans leaves the process's own children alone.

    The test runs in a child, because a process that is a subreaper stays one until its exit.
    """

    def run(control: socket.socket) -> int:
        process.become_subreaper()
        known = process.spawn(lambda _: 3, title="test: known")
        process.wait_readable([known.pidfd], 10.0)

        def leave_an_orphan(inner: socket.socket) -> int:
            pid = os.fork()
            if pid == 0:
                os.setsid()  # leaves the group that dies with its parent
                os._exit(0)
            inner.send(str(pid).encode())
            return 0

        middle = process.spawn(leave_an_orphan, title="test: middle")
        orphan = int(receive(middle))
        process.wait_readable([middle.pidfd], 10.0)
        middle.reap()
        wait_until(lambda: not is_alive(orphan), what="the orphan has exited")
        # The child that the supervisor knows dies first, and may be collected only by its own reap.
        process.reap_adopted({known.pid})
        exit_ = known.reap()
        process.reap_adopted(set())
        control.send(f"{exit_} / {Path(f'/proc/{orphan}').exists()}".encode())
        return 0

    assert receive(spawn(run)) == b"exit code 3 / False"


def test_unbuffered_python_writes_each_print_immediately() -> None:
    """An unbuffered Python writes each print immediately.

    `os._exit` would drop the text in a buffer. The systemd unit therefore sets PYTHONUNBUFFERED=1.
    """
    code = "import os; from streamqd import process; process._tolerate_closed_output();"
    code += " print('now'); os._exit(0)"
    done = subprocess.run([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"now\n"
