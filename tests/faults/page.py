"""Render the table as a page of the documentation: rows, tests and their last outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.faults.results import SERVERS, full_speed_after, shown_on
from tests.faults.table import ROWS, UNTESTED_MAX, Row

NOT_RUN = "not run yet"
_HEAD = f"""\
<!-- Written by `make verify NAME=faults` and `make verify NAME=faults-page`: do not edit. -->

# The fault battery

This page lists the faults that streamqd must survive, such as a killed worker or a lost reply. For
each fault, it describes the required behavior, and lists the tests that check this behavior with
real servers, processes and signals. Tests that use a server run on each of three servers. All other
tests run once.

Read the section of a fault as follows:

- *Covered on* lists the servers on which the fault is tested completely. All tests of the fault
  that use a server passed there, none was skipped, and no other test of the fault failed.
- *Not on* names a server on which a test cannot run, and the reason.
- *Untested* describes the attempts to write a test, for a fault without one. No more than
  {UNTESTED_MAX} faults may have no test.
- A test without a remark passed on every server in its last run.

`make verify NAME=faults` runs these tests, stores each result in `docs/internals/faults.json`, and
writes this page. The test suite fails if this page is outdated, if a fault has no test and no
description of the attempts, or if a fault is not covered on a server that *Not on* does not name.
"""

_ABOUT_SPEED = """\
After a fault, a daemon should not only continue, but also become as fast as before. This table
shows the time from the fault until the daemon handles a backlog at the same rate as before the
fault, for at least 3 s. Each range covers all servers.

The test has one partition, with eight runs of 50 ms at a time. F7 and F8 have two instances with
one partition each, and leases of 5 s, because another instance takes over. For F9, F11 and F14, the
time starts when the server is reachable again. *No drop* means that the rate did not drop by 20% in
any window of 0.5 s, and so does 0.0 in a range."""


def render(tests: Mapping[str, tuple[str, ...]], results: Mapping[str, Any]) -> str:
    """Return the page.

    `tests` maps the marked tests to their rows. `results` are the outcomes of the last run.
    """
    parts = [_HEAD, _run(results), _speeds(tests, results)]
    return "\n".join([*parts, *(_section(row, tests, results) for row in ROWS)])


def _speeds(tests: Mapping[str, tuple[str, ...]], results: Mapping[str, Any]) -> str:
    """Return a table that lists the time until full speed for every fault."""
    lines = [
        "## Time until full speed",
        "",
        _ABOUT_SPEED,
        "",
        "| Fault | Full speed after |",
        "| --- | --- |",
    ]
    for row in ROWS:
        times = full_speed_after(
            [each for each, rows in tests.items() if row.name in rows], results
        )
        after = row.no_speed or NOT_RUN
        if times:
            low, high = (f"{of(times.values()):.1f}" for of in (min, max))
            after = f"{low} s" if low == high else f"{low} to {high} s"
            after = "no drop" if high == "0.0" else after
        lines.append(f"| {row.name}. {row.fault} | {after} |")
    return "\n".join([*lines, ""])


def _run(results: Mapping[str, Any]) -> str:
    if "machine" not in results:
        return "The battery as a whole has not been run yet.\n"
    machine, seconds = results["machine"], results["seconds"]
    servers = ", ".join(
        f"{name} ({about}, {seconds[name]} s)" for name, about in results["servers"].items()
    )
    text = (
        f"Last run: {results['date']}, on {machine['cores']} cores"
        f" ({machine['cpu']}), Python {machine['python']}. Servers: {servers}.\n"
    )
    if "again" in results:
        again = results["again"]
        tests = ", ".join(f"{count} on {name}" for name, count in again["tests"].items())
        text += f"\nSome tests were run again on {again['date']}: {tests}.\n"
    return text


def _section(row: Row, tests: Mapping[str, tuple[str, ...]], results: Mapping[str, Any]) -> str:
    lines = [f"## {row.name}. {row.fault}", "", f"Required: {row.required}", ""]
    if row.untested:
        lines += [f"Untested: {row.untested}", ""]
    shown = [test for test, rows in tests.items() if row.name in rows]
    if shown and results.get("outcomes"):
        servers = shown_on(shown, results)
        lines += [f"Covered on: {', '.join(servers) or 'no server'}.", ""]
    for reason in dict.fromkeys(row.not_on.values()):
        excepted = [server for server, why in row.not_on.items() if why == reason]
        lines += [f"Not on {', '.join(excepted)}: {reason}", ""]
    if shown:
        lines += ["Tests:", ""]
        for test in shown:
            last = _last(test, results)
            lines.append(f"- `{test.removeprefix('tests/')}`{last and f': {last}'}")
        lines.append("")
    return "\n".join(lines)


def _last(test: str, results: Mapping[str, Any]) -> str:
    """Return the last result of a test, or '' if the test passed on every server where it runs."""
    outcomes = {
        server: found[test]
        for server, found in results.get("outcomes", {}).items()
        if test in found
    }
    wanted = set(SERVERS) if test in results.get("on_server", ()) else set(outcomes)
    if outcomes.keys() == wanted and set(outcomes.values()) == {"passed"}:
        return ""
    told = []
    for word in ("passed", "failed", "skipped"):
        servers = [server for server, outcome in outcomes.items() if outcome == word]
        if servers:
            told.append(f"{word} on {', '.join(servers)}")
    return ", ".join(told) or NOT_RUN
