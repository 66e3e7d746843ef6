"""`streamqd doctor` as a command: its exit codes, its formats, and a healthy real daemon."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from streamqd.admin.diagnosis import CHECKS
from streamqd.cli import cli
from streamqd.store.client import Connection
from tests.support import users
from tests.support.daemon import Daemon
from tests.support.doctor_case import DoctorCase
from tests.support.servers import ProcessServer, Server

TESTS = Path(__file__).parent


@pytest.fixture
def doctor_case(tmp_path: Path, server: Server, link: Connection) -> DoctorCase:
    return DoctorCase(tmp_path, server.url, link)


def invoke(path: Path, *args: str, code: int) -> Result:
    result = CliRunner().invoke(cli, ["--config", str(path), "doctor", *args])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def test_doctor_passes_on_a_healthy_daemon(tmp_path: Path, fresh_server: ProcessServer) -> None:
    """The doctor finds nothing on a well configured server while a daemon handles messages."""
    with Daemon(tmp_path, fresh_server.url, partitions=2) as daemon:
        daemon.link.execute("CONFIG", "SET", "maxmemory", 1 << 30)
        daemon.send(["ok"] * 20)
        daemon.wait_settled()

        def report() -> Any:
            result = CliRunner().invoke(
                cli, ["--config", str(daemon.config_path), "doctor", "--json"]
            )
            return json.loads(result.stdout)

        found = report()
        # The version of the server that runs the tests does not matter here.
        told = {each["check"] for each in found["findings"]} - {"server.vulnerabilities"}
        # CONFIG GET shows passwords too, so the administrator in etc/acl may not run it.
        denied = (
            ["everything that needs CONFIG GET, which this user may not run"]
            if users.are_enabled()
            else []
        )
        assert (told, found["unseen"]) == (set(), denied)
        assert found["checks"] == [check.id for check in CHECKS]
        daemon.kill()
        # as if the owner's lease had expired
        daemon.link.execute("ZADD", daemon.keys.members("default"), 1, "one")
        daemon.link.execute(
            "DEL", *(daemon.keys.lease(*assignment) for assignment in daemon.assignments())
        )
        told = {each["check"] for each in report()["findings"]} - {"server.vulnerabilities"}
        assert told == {"fleet.empty", "fleet.silent", "fleet.owner-silent"}


def test_doctor_text_output_shows_problems_and_fixes(doctor_case: DoctorCase) -> None:
    doctor_case.settle_in()
    doctor_case.do("SADD", doctor_case.keys.registry(), "ghost")
    shown = invoke(
        doctor_case.path, "--only", "topics", "--only", "fleet", code=1
    ).stdout.splitlines()
    assert shown[0] == "topics:"
    assert shown[1].startswith("  problem topics.without-meta: ghost is in the registry")
    assert shown[2].startswith("    fix: `streamqd topic create ghost")
    assert shown[3].startswith("    seen: registered=true")
    assert shown[-1] == "26 checks: 1 problem, no warnings"


def test_doctor_exit_codes_match_its_findings(doctor_case: DoctorCase, tmp_path: Path) -> None:
    doctor_case.settle_in()
    invoke(doctor_case.path, "--only", "topics", code=0)
    assert "did you mean topics?" in invoke(doctor_case.path, "--only", "topic", code=2).stderr
    assert (
        "unit file ./none not found" in invoke(doctor_case.path, "--unit", "./none", code=8).stderr
    )
    assert (
        "options must follow the subcommand"
        in invoke(doctor_case.path, "--json", "stream", "a", code=2).stderr
    )

    doctor_case.url = f"unix://{tmp_path}/nobody.sock"
    doctor_case.write()
    unit = tmp_path / "streamqd.service"
    unit.write_text("[Service]\nTimeoutStopSec=10\n")
    result = invoke(doctor_case.path, "--unit", str(unit), "--json", code=4)
    report = json.loads(result.stdout)
    assert [each["check"] for each in report["findings"]] == ["host.stop-timeout"]
    assert "everything in Redis" in report["unseen"][0]
    assert result.stderr.startswith("Error: ")
    shown = invoke(doctor_case.path, "--unit", str(unit), code=4).stdout
    assert shown.endswith("; some checks did not run\n"), "it is not simply healthy"


def test_doctor_list_needs_no_server(doctor_case: DoctorCase) -> None:
    doctor_case.url = "unix:///nowhere"
    doctor_case.write()
    listed = json.loads(invoke(doctor_case.path, "--list", "--json", code=0).stdout)
    assert [each["check"] for each in listed] == [check.id for check in CHECKS]
    assert all(each["cost"] and each["looks_for"] for each in listed)
    shown = invoke(doctor_case.path, "--list", "--only", "permissions", code=0).stdout
    assert shown.splitlines()[1].startswith("permissions.missing  problem")


def test_every_doctor_check_has_a_test() -> None:
    """A check's test seeds its fault, runs only this check, and requires its finding."""
    text = "".join(path.read_text() for path in TESTS.glob("test_doctor_*.py"))
    asked = re.findall(r'(?:finding\(|select_checks\(\[)"([a-z.-]+)"', text)
    lacking = [check.id for check in CHECKS if check.id not in asked]
    assert lacking == []
    assert len({check.id for check in CHECKS}) == len(CHECKS) >= 25


def test_doctor_runs_no_unbounded_command(doctor_case: DoctorCase, link: Connection) -> None:
    """No reply to the doctor grows with the number of keys or with the entries of a key."""
    doctor_case.settle_in()
    link.execute("CONFIG", "RESETSTAT")
    invoke(doctor_case.path, code=1)
    stats = link.execute("INFO", "commandstats").decode()
    used = {line.split(":")[0].removeprefix("cmdstat_") for line in stats.splitlines()[1:]}
    assert "zcard" in used
    assert not {"keys", "scan", "hscan", "sscan", "zscan", "randomkey"} & used
    writing = {"set", "hset", "zadd", "sadd", "xadd", "del", "xack", "xtrim", "xgroup|create"}
    assert not writing & used, "what the check of rights queues is discarded, so not counted"
