"""A long soak under random faults: nothing is lost, and every duplicate has a known cause.

Skipped unless MINUTES sets its length: `make soak NAME=nemesis`. SEED repeats the plan of a run.
RESULT names the result file; a text version is written next to it.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import secrets
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.machine import machine
from tests.support.nemesis import FAULTS, PEACE, plan
from tests.support.servers import ProcessServer
from tests.support.trial import GROUPS, Outcome, Trial

pytestmark = [
    pytest.mark.timeout(24 * 3600),
    pytest.mark.skipif(
        "MINUTES" not in os.environ, reason="a soak test: `make soak NAME=nemesis` runs it"
    ),
]

ROOT = Path(__file__).parents[2]
MINUTES = float(os.environ.get("MINUTES") or "10")
SEED = int(os.environ.get("SEED") or secrets.randbelow(1 << 32))
INSTANCES, PARTITIONS = "abc", 8
PEACEFUL_PART = 0.2  # share of the time without faults


def test_random_faults_lose_nothing(new_server: Any, tmp_path: Path) -> None:
    print(f"\nMINUTES={MINUTES:g} SEED={SEED}", flush=True)
    seconds = 60 * MINUTES
    rough = soak(new_server(aof=True), tmp_path / "faults", FAULTS, seconds * (1 - PEACEFUL_PART))
    peace = soak(new_server(aof=True), tmp_path / "peace", PEACE, seconds * PEACEFUL_PART)

    write_result({"faults": rough, "peace": peace})
    assert rough.wrong() == peace.wrong() == {}
    assert peace.report.duplicated == []
    assert peace.fenced == peace.events["worker.crashed"] == 0


def soak(server: ProcessServer, folder: Path, kinds: tuple[str, ...], seconds: float) -> Outcome:
    """Run one part to the end."""
    folder.mkdir()
    peaceful = kinds is PEACE
    planned = plan(SEED, seconds, every=1.5, lasting=(0.5, 6.0), kinds=kinds)
    settings = {"max_messages": 50} if peaceful else {"max_messages": 500}
    ttl = 10.0 if peaceful else 2.0
    with Trial(
        *(folder, server),
        names=INSTANCES,
        partitions=PARTITIONS,
        lease_ttl=ttl,
        seed=SEED,
        consumer=settings,
    ) as trial:
        trial.run(planned)
        outcome = trial.finish()
        for name, faults in outcome.wrong().items():
            print(f"{name}: {faults}", flush=True)
        print(trial.evidence(outcome), flush=True)
    return outcome


# --- the report -----------------------------------------------------------------------------------


def write_result(parts: dict[str, Outcome]) -> None:
    """Print the report, and write it to the file that RESULT names."""
    document = {
        "command": f"make soak NAME=nemesis MINUTES={MINUTES:g} SEED={SEED}",
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "seed": SEED,
        "minutes": MINUTES,
        "instances": len(INSTANCES),
        "partitions": PARTITIONS,
        "groups": len(GROUPS),
        "machine": machine(),
        "parts": {name: describe_outcome(outcome) for name, outcome in parts.items()},
    }
    text = format_document(document)
    print(text, flush=True)
    if "RESULT" in os.environ:
        path = ROOT / os.environ["RESULT"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        path.with_suffix(".txt").write_text(text, "utf-8")


def describe_outcome(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome of one part as plain values. Times are relative to the first strike."""
    report = outcome.report
    zero = outcome.strikes[0].began if outcome.strikes else 0.0
    return {
        "sent": report.sent,
        "unknown": report.unknown,
        "refused": report.refused,
        "runs": report.handled,
        "dead": report.dead,
        "lost": report.lost,
        "duplicated": len(report.duplicated),
        "causes": report.causes(),
        "most_of_one_strike_and_slot": report.max_repeats(),
        "blamed": report.blamed,
        "charged": report.charged,
        "charged_most": report.charged_most,
        "duplicates": [each._asdict() for each in report.duplicated],
        "recovered": len(report.recovered),
        "unexpected": report.unexpected,
        "wrong": {name: [str(one) for one in faults] for name, faults in failed_checks(outcome)},
        "fenced": outcome.fenced,
        "slack_seconds": round(report.slack_seconds, 3),
        "longest_stall_seconds": round(report.stall_seconds, 2),
        "settled_after_seconds": outcome.heal_seconds,
        "conservation_checks": outcome.checks,
        "events": outcome.events,
        "strikes": dict(sorted(Counter(each.kind for each in outcome.strikes).items())),
        "log": [
            [each.number, each.kind, each.whom, list(each.pids)]
            + [round(at - zero, 3) for at in (each.began, each.ended)]
            for each in outcome.strikes
        ],
    }


def failed_checks(outcome: Outcome) -> list[tuple[str, list[object]]]:
    """Return the names of the checks that failed."""
    return [(name, list(faults)) for name, faults in outcome.wrong().items()]


def format_document(document: dict[str, Any]) -> str:
    """Return the document as text, without its log."""
    cpu = document["machine"]
    size = ", ".join(f"{document[name]} {name}" for name in ("instances", "partitions", "groups"))
    assignments = document["partitions"] * document["groups"]
    lines = [
        f"{document['command']}   {document['date']}",
        f"{size}; {cpu['cores']} cores, {cpu['cpu']}, Python {cpu['python']}",
    ]
    for name, part in document["parts"].items():
        causes = f" ({_format_counts(part['causes'])}; slack {part['slack_seconds']} s)"
        most, most_charges = part["most_of_one_strike_and_slot"], part["charged_most"]
        stall, settled = part["longest_stall_seconds"], part["settled_after_seconds"]
        lines += ["", f"{name}: {_format_counts(part['strikes'])}"]
        lines += [
            "  " + line
            for line in (
                _format_counts(
                    {key: part[key] for key in ("sent", "unknown", "refused", "runs", "dead")}
                ),
                f"lost {len(part['lost'])}",
                f"duplicated {part['duplicated']}{causes if part['duplicated'] else ''}",
                f"most of one strike and slot: {_format_counts(most) or 'none'}",
                f"charged {part['blamed']}; seen {part['charged']}, of one at most {most_charges}",
                f"recovered {part['recovered']}",
                f"unexpected {len(part['unexpected'])}",
                f"fenced {part['fenced']}",
                f"longest stall {stall} s; all was settled {settled} s after the end",
                f"conservation checked {part['conservation_checks']} times in {assignments} units",
                f"wrong: {part['wrong'] or 'nothing'}",
            )
        ]
    return "\n".join(lines) + "\n"


def _format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
