"""Find blocked event loops, and the lines of code that block them.

A worker's event loop writes heartbeats to its slot (`worker/loop_heartbeat.py`). After
`loop_blocked_after` seconds without a heartbeat, the supervisor sends a signal that makes the
loop's thread write its stack, even while it executes C code. This does not stop the handler, which
only its time limits do.
"""

from __future__ import annotations

import functools
import logging
import math
import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from streamqd import logs, worker
from streamqd.isolate import Isolate, run_directly
from streamqd.model import Assignment
from streamqd.process import Child
from streamqd.scoreboard import LOOP_HEARTBEAT_SECONDS, now_ns
from streamqd.supervisor.partition import AssignmentState

MESSAGES_MAX = 8  # number of running messages that one event lists
STACK_POLL_SECONDS = 0.02  # interval between checks for a requested stack
STACK_SECONDS = 0.3  # longest wait for a requested stack

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_HEADER = "Stack (most recent call first)"
_OURS = str(Path(worker.__file__).parent) + "/"


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass
class _Silence:
    """An event loop without a heartbeat, and how far it has been reported."""

    child: Child
    heartbeat_ns: int  # time of the last heartbeat
    report_at: float = 0.0  # monotonic time of the next report
    asked_at: float = 0.0  # monotonic time of the request for its stack, 0 if there is none
    reported: bool = False
    unexplained: bool = False  # True if no stack has arrived, or it did not show the user's code


@dataclass
class LoopWatch:
    """Watches the event loops of all workers."""

    isolate: Isolate[Assignment] = run_directly
    _silent: dict[Assignment, _Silence] = field(default_factory=dict)

    def observe(self, partitions: Iterable[AssignmentState], now: float, after: float) -> float:
        """Report loops that have written no heartbeat for `after` seconds.

        If `after` is 0, nothing is reported. Return the monotonic time at which to check again.
        """
        next_at = math.inf
        for partition in partitions:
            found = self.isolate(
                partition.assignment, self._check, partition, now, after or math.inf
            )
            next_at = min(next_at, found or math.inf)
        return next_at

    def is_asked(self, assignment: Assignment) -> bool:
        """Return True if `observe` has requested a stack from the worker and is waiting for it.

        The stack must then be left to `observe`.
        """
        found = self._silent.get(assignment)
        return found is not None and found.asked_at > 0

    def _check(self, partition: AssignmentState, now: float, after: float) -> float:
        child, heartbeat_ns = partition.child, partition.slot.loop_heartbeat_ns
        silence = self._silent.get(partition.assignment)
        if silence and (silence.child is not child or silence.heartbeat_ns != heartbeat_ns):
            self._report_resumed(partition, silence)
            silence = None
        if child is None or not heartbeat_ns:
            return math.inf
        seconds = (now_ns() - heartbeat_ns) / 1e9
        # The block may have started up to one heartbeat interval after the last heartbeat.
        left = after + LOOP_HEARTBEAT_SECONDS - seconds
        if left > 0:
            return now + left
        if silence is None:
            silence = self._silent[partition.assignment] = _Silence(child, heartbeat_ns)
        if now < silence.report_at:
            return silence.report_at
        if not silence.asked_at:
            silence.asked_at = now
            child.ask_stack(partition.slot.loop_thread)
            return now + STACK_POLL_SECONDS
        stack = child.poll_stack()
        if not stack and now - silence.asked_at < STACK_SECONDS:
            return now + STACK_POLL_SECONDS
        silence.asked_at = 0.0
        frame = blocking_frame(stack)
        if frame is None and not silence.unexplained:
            # The whole host may have been slow, so report this only if it is found again.
            silence.unexplained = True
            silence.report_at = now + after
        else:
            silence.report_at = now + seconds  # the interval doubles with each report
            self._report(partition, silence, seconds, frame, stack)
        return silence.report_at

    def _report(
        self,
        partition: AssignmentState,
        silence: _Silence,
        seconds: float,
        frame: Frame | None,
        stack: str,
    ) -> None:
        slot = partition.slot
        if not silence.reported:
            silence.reported = True
            slot.add("loop_blocked")
        slot.note_blocker(str(frame or ""))
        slot.loop_blocked_ns = silence.heartbeat_ns
        running = sorted(slot.running, key=lambda each: each.sequence)
        logs.event(
            "loop.blocked",
            logging.WARNING,
            trace=stack,
            assignment=partition.assignment,
            child=silence.child.pid,
            seconds=round(seconds, 1),
            file=frame and frame.file,
            line=frame and frame.line,
            function=frame and frame.function,
            running=len(running),
            messages=[_name(partition.assignment, each.place) for each in running[:MESSAGES_MAX]],
        )

    def _report_resumed(self, partition: AssignmentState, silence: _Silence) -> None:
        """Report that a loop is running again, unless its process has exited."""
        del self._silent[partition.assignment]
        if not silence.reported:
            return
        now = partition.slot.loop_turned_ns = now_ns()
        partition.slot.loop_blocked_ns = 0
        if silence.child is partition.child:
            seconds = round((now - silence.heartbeat_ns) / 1e9, 1)
            logs.event(
                "loop.resumed",
                assignment=partition.assignment,
                child=silence.child.pid,
                seconds=seconds,
            )


def blocking_frame(stack: str) -> Frame | None:
    """Return the frame that blocks an event loop: the innermost frame of the user's own code.

    If the stack shows no such frame, for example because the application is an installed package,
    return the outermost frame of an installed package. Return None if the stack shows only the
    loop itself, because in that case the loop is waiting for another thread.
    """
    found = [
        Frame(file, int(line), function)
        for file, line, function in _FRAME.findall(stack.rpartition(_HEADER)[2])
    ]
    library, packages = _directories("stdlib", "platstdlib"), _directories("purelib", "platlib")
    # Installed packages do not belong to the standard library, although their directories are
    # below it.
    others = [
        each
        for each in found
        if not each.file.startswith((_OURS, "<frozen "))
        and (each.file.startswith(packages) or not each.file.startswith(library))
    ]
    own = [each for each in others if not each.file.startswith(packages)]
    if own:
        return own[0]
    return others[-1] if others else None


@functools.cache
def _directories(*names: str) -> tuple[str, ...]:
    """Return the paths of Python's directories with these names, each ending with a slash.

    Do not call this before workers are forked, because it makes `sysconfig` keep 0.6 MiB of build
    variables in memory, which every worker would inherit.
    """
    return tuple({str(Path(sysconfig.get_path(name))) + "/" for name in names})


def _name(assignment: Assignment, place: bytes) -> str:
    """Return the uid of a message, or its place if it is a retry or a dead letter."""
    kind, _, entry_id = place.decode("ascii", "replace").partition(":")
    if kind != "m" or assignment.reads_dead_letters:
        return f"{kind}:{entry_id}"
    return f"{assignment.topic}/{assignment.partition}/{entry_id}"
