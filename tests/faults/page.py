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

Software that promises to lose no message must also keep this promise when processes, servers and
networks fail. This page lists the faults that streamqd must survive, such as a killed worker or a
lost reply. For each fault, it states the required behavior, and lists the tests that cause the
fault with real servers, processes and signals, and check this behavior. Tests that use a server run
on three different ones, and all other tests run once.

The section of each fault contains the following lines:

- *Required* states how streamqd must behave. The [glossary](../reference/glossary.md) defines its
  terms, such as *to charge* a message with a crash.
- *Covered on* lists the servers on which the fault is tested completely: all tests of the fault
  that use a server have passed there, none was skipped, and no other test of the fault has failed.
- *Not on* names a server on which a test cannot run, and gives the reason.
- *Untested* appears only if a fault has no test. It describes the attempts to write one. At most
  {UNTESTED_MAX} faults may be untested.
- *Tests* lists the tests. A test without a remark passed in its last run on every server.

`make verify NAME=faults` runs these tests, stores each result in `docs/internals/faults.json`, and
writes this page. The default test suite fails in three cases: if this page is outdated, if a fault
has neither a test nor a description of the attempts, or if a fault is not covered on a server and
*Not on* does not give a reason.
"""

_ABOUT_SPEED = """\
It is not enough that a daemon continues after a fault: it should also be as fast as before. This
table shows how long this takes. A daemon counts as fast again when it handles at least 80% of the
messages per second that it handled before the fault, in every window of 0.5 s, for at least 3 s. A
range covers the results on all servers.

The test runs a daemon with a backlog in one partition and eight concurrent runs of 50 ms each. For
F7 and F8, there are two instances with one partition each, because the other instance has to take
over. Leases expire after 5 s. For F9, F11 and F14, the time starts when the server is reachable
again. *No drop* means that the rate never fell below 80%, and 0.0 s in a range means the same for
one of the servers."""


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
