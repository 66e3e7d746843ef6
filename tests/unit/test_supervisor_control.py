"""An instance logs few lines about the directives that it reads."""

from __future__ import annotations

from streamqd import logs
from streamqd.model import Assignment
from streamqd.store.directives import Directive, Directives, Scope
from streamqd.supervisor.control import LOGGED_MAX, Control


def test_unreadable_directives_log_few_lines(monkeypatch) -> None:
    """Unreadable directives take few lines in the log, and valid ones are obeyed."""
    lines: list[tuple[str, str]] = []
    monkeypatch.setattr(
        logs, "event", lambda name, **fields: lines.append((name, fields["directive"]))
    )
    order = Directive(1, "mallory", "")
    control = Control("one")
    control.read(Directives(pauses={Scope("t", number): order for number in range(5_000)}))

    assert [name for name, _ in lines] == ["pause.requested"] * (LOGGED_MAX + 1)
    assert lines[-1][1] == f"{5_000 - LOGGED_MAX:,} more"
    assert control.is_paused(Assignment("t", 4_999, "g"))

    lines.clear()
    control.read(Directives())
    assert [name for name, _ in lines] == ["pause.removed"] * (LOGGED_MAX + 1)


def test_stack_is_requested_once_and_not_after_a_restart() -> None:
    assignment, other = Assignment("t", 0, "g"), Assignment("t", 1, "g")
    control = Control("one")
    control.read(Directives(stacks={assignment: Directive(1, "otto", "")}))
    assert control.take_stacks() == {}  # the request is older than this start

    again = Directive(2, "otto", "")
    control.read(Directives(stacks={assignment: again}))
    control.read(Directives(stacks={assignment: again, other: again}))
    assert control.take_stacks() == {assignment: again, other: again}
    assert control.take_stacks() == {}
    control.read(Directives(stacks={assignment: again}))
    assert control.take_stacks() == {}
