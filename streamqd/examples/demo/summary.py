"""The summary of the demonstration: the results, and commands to try next."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path

from streamqd.examples.demo.board import number, shorten, table
from streamqd.examples.demo.stage import Folder
from streamqd.examples.demo.tally import GROUPS, PARTITIONS, TOPIC, DemoTally

DEAD_LETTERS_SHOWN = 4


def print_summary(tally: DemoTally, fed_seconds: float, all_seconds: float) -> bool:
    """Print the results. Return True if all counts match."""
    runs = tally.handled.total() + tally.dead.total()
    _head("Results")
    print(
        f"  {number(tally.lines)} lines were sent to {len(PARTITIONS)} partitions in"
        f" {fed_seconds:.1f} s.\n"
        f"  Both groups handled all of them within {all_seconds:.1f} s of the first send:\n"
        f"  {number(runs / all_seconds)} handler runs per second, each in its own transaction.\n"
    )
    groups = [
        (group, tally.count_group(tally.handled, group), tally.count_group(tally.dead, group))
        for group in GROUPS
    ]
    print(table(("group", "handled", "dead-lettered"), groups), end="\n\n")
    partitions = [
        (str(each), tally.added[each], *(tally.handled[group, each] for group in GROUPS))
        for each in PARTITIONS
    ]
    print(table(("partition", "produced", *(f"{group} handled" for group in GROUPS)), partitions))

    _head("Most requested (group hits)")
    hits = [(count, str(status), shorten(path, 62)) for path, status, count in tally.top("hits")]
    print(table(("hits", "status", "path"), hits[:10]))
    _head("Most frequent agents (group agents)")
    agents = [(count, shorten(agent, 68)) for agent, count in tally.top("agents")]
    print(table(("hits", "agent"), agents[:5]))
    _print_dead_letters(tally)
    return _print_checks(tally.checks())


def _print_dead_letters(tally: DemoTally) -> None:
    _head("Dead letters")
    for dead_letter in tally.dead_letters[:DEAD_LETTERS_SHOWN]:
        why = dead_letter["error_message"] or dead_letter["reason"]
        print(f"  {dead_letter['id']}  group {dead_letter['group']}: {why}")
    for payload in dict.fromkeys(
        dead_letter["payload"] for dead_letter in tally.dead_letters[:DEAD_LETTERS_SHOWN]
    ):
        print(f"\n  The payload, a truncated line of the log:\n    {payload}")


def _print_checks(checks: list[tuple[bool, str]]) -> bool:
    good = all(ok for ok, _ in checks)
    _head("The counts match" if good else "The counts DO NOT match")
    for ok, sentence in checks:
        print(f"  {'✓' if ok else '✗'} {sentence}")
    return good


def where_to_look(folder: Folder, tally: DemoTally, *, serving: bool) -> None:
    """Print commands that work with this run's data."""
    command = _relative_path(Path(sys.executable).with_name("streamqd"))
    start = f"{shlex.quote(str(command))} -c {shlex.quote(str(_relative_path(folder.config)))}"
    _head("Next steps")
    if not serving:
        print(f"  {start}\n      start the daemon again with this data; while it runs:")
    verbs = ["status", "partitions", f"tail {TOPIC}"]
    verbs += [f"dlq show {TOPIC} {dead_letter['id']}" for dead_letter in tally.dead_letters[:1]]
    for verb in verbs:
        print(f"  {start} {verb}")
    print(f"  http://127.0.0.1:{folder.port}/    status page; metrics at /metrics")
    print(f"  {_relative_path(folder.log)}    daemon log")


def _relative_path(path: Path) -> Path:
    with contextlib.suppress(ValueError):
        return path.absolute().relative_to(Path.cwd())
    return path


def _head(title: str) -> None:
    print(f"\n{title}\n")
