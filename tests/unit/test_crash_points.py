"""Every crash point is in the matrix, and every script that changes data has its crash points."""

from __future__ import annotations

from streamqd.store import scripts
from tests.acceptance import test_schedules
from tests.support import kill_housekeepers, kill_matrix, kill_relays, kill_trials
from tests.support.crash_points import ELSEWHERE, POINTS, PRODUCER, SCRIPTS
from tests.support.kill_commands import COMMANDS

# These two points are in the caller of a script that has another name.
USES = {
    "settle_charged": "settle_ack",
    "quarantine_end": "quarantine_mark",
    "schedule_promote": "message_promote",
    "letters_expire": "dead_purge",
}


def test_every_crash_point_is_in_the_matrix():
    worker = {row.point for row in [*kill_matrix.ROWS, *kill_matrix.BLOCKED]}
    worker |= {*kill_matrix.DESTROYED}
    supervisor = {row.point for row in kill_trials.ROWS}
    schedules = {*test_schedules.FIRING, *test_schedules.MOVING}
    parts = [worker, supervisor, {*kill_housekeepers.POINTS}, {*COMMANDS}, {*PRODUCER}, schedules]
    parts.append({*kill_relays.POINTS})

    assert set().union(*parts) == POINTS
    assert sum(map(len, parts)) == len(POINTS), "a point belongs to one process"


def test_every_writing_script_has_crash_points():
    changing = {
        name for name, script in scripts.load().items() if scripts.GUARDS_END in script.body
    }
    pointed = {USES.get(name, name) for names in SCRIPTS.values() for name in names}

    assert pointed & ELSEWHERE.keys() == set()
    assert pointed | ELSEWHERE.keys() == changing
