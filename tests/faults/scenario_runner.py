"""Lose each command of a scenario once: the first, the second and the last of each kind.

A scenario creates a state, acts on it through a proxy in a role of streamqd, and handles lost
connections as that role does. It may also check the result. The scenario first runs without a
fault. It then runs once more for each kind of command that the first run sent, with that command
lost. Each time, the final state of the server must equal the state after the first run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from streamqd.store import scripts
from streamqd.store.client import Connection, connect
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.contract.harness import ASSIGNMENT, Harness
from tests.support.proxy import Fault, FaultProxy, Trigger
from tests.support.servers import ProcessServer

WHOLE = (Fault.DROP_REPLY, Fault.CUT_BEFORE)
FAULTS = (*WHOLE, Fault.CUT_REPLY)
BY_SOURCE = "EVAL "
_SCRIPTS = {script.sha.encode(): name for name, script in scripts.load().items()}
_MOMENT = re.compile(r"\d{13}(-\d+)?(\.\d+)?")  # a time in ms, or an id from the server
_RANDOM = re.compile(r"\b[0-9a-f]{32}\b")  # a token, or the id of a delayed send


class LostCommand(NamedTuple):
    """The command to lose: the nth one of its kind."""

    kind: str
    nth: int


@dataclass
class ScenarioContext:
    """A server behind a proxy, and a harness with a direct connection, for use by a scenario."""

    server: ProcessServer
    harness: Harness
    proxy: FaultProxy
    trigger: Trigger | None = None
    lost: LostCommand | None = None

    @property
    def link(self) -> Connection:
        """A connection that no fault affects."""
        return self.harness.link

    @property
    def keys(self) -> Keys:
        return self.harness.keys

    @property
    def store(self) -> Store:
        return Store(self.link, self.keys)

    def faulty_link(self, name: str = "test:faulty") -> Connection:
        """Return a connection through the proxy, which loses the command."""
        return connect(self.proxy.settings, timeout=5.0, name=name)

    def server_link(self) -> Connection:
        """Return another connection that no fault affects."""
        return connect(self.server.settings, timeout=5.0, name="test:beside")

    @property
    def struck(self) -> bool:
        """True once the command has been lost."""
        return self.trigger is not None and self.trigger.hit

    def sent(self, kind: str) -> bool:
        """Return True if a command of this kind was sent, whether or not it arrived."""
        return self.struck or any(call_kind(command) == kind for command in self.proxy.commands)


Scenario = Callable[[ScenarioContext], None]


def call_kind(command: list[bytes]) -> str:
    """Return the name of a command, or of the script that it calls."""
    name = command[0].decode().upper()
    if name == "EVALSHA":
        return _SCRIPTS.get(command[1], name)
    if name == "EVAL":
        return BY_SOURCE + command[1].split(b":", 1)[0].removeprefix(b"-- ").decode()
    return name


class ScenarioRunner:
    """Runs a scenario with and without faults."""

    def __init__(
        self,
        server: ProcessServer,
        link: Connection,
        keys: Keys,
        scenario: Scenario,
        *,
        scripts_loaded: bool = True,
    ) -> None:
        self._server = server
        self._harness = Harness(link, keys, ASSIGNMENT)
        self._scenario = scenario
        # If a script is not loaded, its first call takes two commands: one by hash, one by source.
        # When `scripts_loaded` is False, a call by source counts as a separate kind.
        self._scripts_loaded = scripts_loaded
        link.pipeline([("SCRIPT", "LOAD", script.source) for script in scripts.load().values()])

    def kinds(self) -> Counter[str]:
        """Run the scenario without faults, and return the number of commands of each kind."""
        return Counter(call_kind(command) for command in self._run(None, None).commands)

    def survive(self, fault: Fault) -> int:
        """Run the scenario once for each command to lose. Return the number of lost commands."""
        kinds = Counter(call_kind(command) for command in self._run(None, None).commands)
        expected = normal(self._harness.state())
        count = 0
        for lost in lost_commands(kinds, fault):
            try:
                struck = self._run(lost, fault).struck
                found = normal(self._harness.state())
                assert found == expected, differences(found, expected)
            except AssertionError as error:
                raise AssertionError(
                    f"{fault.name} of {lost.kind} number {lost.nth}: {error}"
                ) from error
            count += struck
        assert count, "nothing was lost"
        return count

    def survive_cuts(self, direction: str, count: int) -> int:
        """Run with the connection cut at one byte position after another. Return how many cuts.

        The positions are spread over all bytes of a direction: at least `count` of them, if it has
        as many.
        """
        run = self._run(None, None)
        expected = normal(self._harness.state())
        total = run.passed_bytes[0 if direction == "requests" else 1]
        cuts = range(1, total, max(1, total // count))
        for number in cuts:
            try:
                self._run(None, None, {direction: number})
                found = normal(self._harness.state())
                assert found == expected, differences(found, expected)
            except AssertionError as error:
                raise AssertionError(f"cut at byte {number} of {direction}: {error}") from error
        return len(cuts)

    def _run(
        self, lost: LostCommand | None, fault: Fault | None, cut: dict[str, int] | None = None
    ) -> ScenarioRun:
        self._harness.do("FLUSHALL")
        if not self._scripts_loaded:
            self._harness.do("SCRIPT", "FLUSH")
        with FaultProxy(self._server.socket_path) as proxy:
            proxy.cut_after(**(cut or {}))
            context = ScenarioContext(self._server, self._harness, proxy)
            if lost is not None and fault is not None:
                context.lost = lost
                context.trigger = proxy.arm(
                    fault, nth=lost.nth, wanted=lambda each: call_kind(each) == lost.kind
                )
            self._scenario(context)
            return ScenarioRun(proxy.commands, context.struck, proxy.passed_bytes)


class ScenarioRun(NamedTuple):
    commands: list[list[bytes]]
    struck: bool
    passed_bytes: tuple[int, int]  # bytes of requests, and bytes of replies


def lost_commands(kinds: Counter[str], fault: Fault) -> Iterator[LostCommand]:
    """Yield the first, second and last command of each kind, or only the first for half replies."""
    for kind, count in sorted(kinds.items()):
        for nth in [1] if fault is Fault.CUT_REPLY else sorted({1, min(2, count), count}):
            yield LostCommand(kind, nth)


def normal(value: Any) -> Any:
    """Return a state without values that differ between runs: times, tokens and generated ids."""
    if isinstance(value, dict):
        return sorted(((normal(key), normal(each)) for key, each in value.items()), key=repr)
    if isinstance(value, tuple | list):
        return [normal(each) for each in value]
    if isinstance(value, set):
        return sorted(map(normal, value))
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, int):
        value = str(value)
    if not isinstance(value, str):
        return value
    return _MOMENT.sub("<moment>", _RANDOM.sub("<random>", value))


def differences(found: list[Any], expected: list[Any]) -> str:
    """Describe the differences between two states."""
    more = [each for each in found if each not in expected]
    less = [each for each in expected if each not in found]
    return f"instead of\n  {less}\nthere is\n  {more}"
