"""`make bench` records the right versions for each system."""

from __future__ import annotations

import json
from pathlib import Path

from tests.benchmarks.peers.environments import HERE, versions
from tests.benchmarks.peers.systems import SYSTEMS, System
from tests.support import fetch_server


def system(name: str) -> System:
    return next(each for each in SYSTEMS if each.name == name)


def test_versions_name_the_package_and_its_client(tmp_path: Path) -> None:
    installed = {"rq": "3.0", "redis": "8.1", "hiredis": "3.5", "click": "8"}

    assert versions(system("RQ, a fork per job"), tmp_path / "bin", installed) == {
        "version": "3.0",
        "package": "rq",
        "clients": {"redis": "8.1", "hiredis": "3.5"},
    }


def test_versions_name_a_client_compiled_into_a_wheel(tmp_path: Path) -> None:
    lists = tmp_path / "lib/python3/site-packages/chasquimq-1.3.0.dist-info/sboms"
    lists.mkdir(parents=True)
    parts = {"components": [{"name": "fred", "version": "10.1.0"}]}
    (lists / "chasquimq-py.cyclonedx.json").write_text(json.dumps(parts))

    found = versions(system("ChasquiMQ"), tmp_path / "bin", {"chasquimq": "1.3.0"})
    assert found["clients"] == {"fred": "10.1.0"}


def test_every_system_has_its_files_and_a_known_server() -> None:
    for each in SYSTEMS:
        assert (HERE / "apps" / (each.app if each.node else f"{each.app}.py")).exists(), each.name
        for kind in ("in", "txt") if each.environment else ():
            assert (HERE / "requirements" / f"{each.environment}.{kind}").exists(), each.name
        assert each.server in {"", *fetch_server.WHEELS, *fetch_server.SOURCES}, each.name
