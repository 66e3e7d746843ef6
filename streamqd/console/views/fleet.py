"""The instances of the fleet, and the directives that are in force."""

from __future__ import annotations

from streamqd.admin import directives
from streamqd.admin.directives import DirectiveRow
from streamqd.admin.instances import InstanceRow
from streamqd.console.view import ConsoleView, Context, Visit
from streamqd.store.directives import Scope, parse_scope


def show(visit: Visit) -> Context:
    """Return the instances, and the directives that are in force."""
    control = directives.view(visit.resources.fleet)
    instances = sorted(visit.now.snapshot.instances, key=_by_name)
    return {
        "page": visit.paginate(instances, visit.limit),
        "reloads": [each for each in instances if each.reload],
        "drained": {each.target for each in control.directives if each.kind == "drain"},
        "directives": [(each, _place(each)) for each in control.directives],
        "unreadable": control.unreadable_directives,
    }


def _by_name(row: InstanceRow) -> str:
    return row.instance


def _place(row: DirectiveRow) -> dict[str, object]:
    """Return the topic, partition and group in a directive's target, as parameters of a view."""
    named = row.kind in ("pause", "stop", "move")
    return (parse_scope(row.target) if named else Scope())._asdict()


VIEWS = (ConsoleView("fleet", "/fleet", "Fleet", show, label="Fleet", key="f"),)
