"""Every script has a header, survives wrong types and full memory, and has a test for each word."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamqd.errors import RedisResponseError
from streamqd.store import scripts
from streamqd.store.client import connect
from tests.contract import scenarios
from tests.contract.harness import Harness
from tests.contract.scenarios import UNTOUCHED, WHEN_FULL, Scenario
from tests.support.servers import ProcessServer, Server
from tests.support.waiting import wait_until

HERE = Path(__file__).parent
CASES = [pytest.param(scenario, id=scenario.__name__) for scenario in WHEN_FULL]
BROKEN = [
    pytest.param(scenario, key.name, id=f"{scenario.__name__}-{key.name}")
    for scenario in WHEN_FULL
    for name in [max((n for n in scripts.load() if scenario.__name__.startswith(n)), key=len)]
    for key in scripts.get(name).keys
    if (scenario, key.name) not in UNTOUCHED
]


READ_ONLY = (
    scenarios.partition_snapshot,
    scenarios.group_ensure_there,
    scenarios.stream_step,
    scenarios.retry_page,
    scenarios.stream_page,
    scenarios.message_find,
    scenarios.schedule_page,
)


def test_every_script_has_a_scenario() -> None:
    names = {name for name in scripts.load() if not name.endswith("_measure")}
    assert names <= {scenario.__name__ for scenario in WHEN_FULL}


@pytest.mark.parametrize("name", sorted(scripts.load()))
def test_script_passes_the_lint(name: str) -> None:
    assert scripts.lint(scripts.get(name)) == []


@pytest.mark.parametrize("name", sorted(scripts.load()))
def test_script_compiles_to_the_hash_of_its_source(harness: Harness, name: str) -> None:
    script = scripts.get(name)
    assert harness.do("SCRIPT", "LOAD", script.source).decode() == script.sha


@pytest.mark.parametrize("scenario", CASES)
def test_every_scenario_succeeds(harness: Harness, scenario: Scenario) -> None:
    call = scenario(harness)
    before = harness.dump()
    assert harness.link.run(call).word in ("OK", "MINE", "LATE", "CREATED", "ADDED")
    reads_only = scenario in READ_ONLY
    assert reads_only or scenario is scenarios.lease_renew or harness.dump() != before


@pytest.mark.parametrize(("scenario", "key"), BROKEN)
def test_wrong_type_is_refused_before_the_first_write(
    harness: Harness, scenario: Scenario, key: str
) -> None:
    call = scenario(harness)
    name = call.argv[[spec.name for spec in call.script.keys].index(key)]
    harness.do("DEL", name)
    harness.do("RPUSH", name, "a list is what no script expects")
    harness.expect_error("WRONGTYPE", call)


@pytest.mark.fault("F21")
@pytest.mark.parametrize("scenario", CASES)
def test_scripts_respect_full_memory(harness: Harness, scenario: Scenario) -> None:
    """With full memory, replacing a child, reading, acknowledging and trimming still work.

    All else waits.
    """
    call = scenario(harness)
    before = harness.dump()
    with harness.full_memory():
        try:
            word = harness.link.run(call).word
        except RedisResponseError as error:
            word = error.code
    assert word == WHEN_FULL[scenario]
    if word == "OOM":
        assert harness.dump() == before


# Ways to make a server refuse writes, and to make it accept them again.
REFUSALS = {
    "NOREPLICAS": (
        ("CONFIG", "SET", "min-replicas-to-write", 1),
        ("CONFIG", "SET", "min-replicas-to-write", 0),
    ),
    "READONLY": (("REPLICAOF", "127.0.0.1", 1), ("REPLICAOF", "NO", "ONE")),
    "MISCONF": (("CONFIG", "SET", "save", "3600 1"), ("CONFIG", "SET", "save", "")),
}


@pytest.fixture(scope="module")
def failed_snapshot(server: Server) -> Iterator[None]:
    """Make the server's last snapshot fail.

    If snapshots are enabled, the server then refuses writes.
    """
    if not isinstance(server, ProcessServer):
        pytest.skip("needs the folder of a server")
    link = connect(server.settings, timeout=10.0, name="test:snapshot")
    place = server.folder / "dump.rdb"
    place.unlink(missing_ok=True)

    def snapshot(status: bytes) -> None:
        link.execute("BGSAVE")
        told = b"rdb_last_bgsave_status:" + status
        wait_until(
            lambda: told in link.execute("INFO", "persistence"), what=f"a snapshot: {told!r}"
        )

    place.mkdir()
    snapshot(b"err")
    yield
    place.rmdir()
    snapshot(b"ok")
    place.unlink()
    link.close()


@pytest.mark.fault("F17", "F22")
@pytest.mark.usefixtures("failed_snapshot")
@pytest.mark.parametrize("code", REFUSALS)
@pytest.mark.parametrize("scenario", CASES)
def test_script_is_refused_whole_without_write_access(
    harness: Harness, scenario: Scenario, code: str
) -> None:
    """Without write access, a script is refused as a whole, unless it has nothing to write."""
    call = scenario(harness)
    harness.do("SCRIPT", "LOAD", call.script.source)
    before = harness.dump()
    refuse, accept = REFUSALS[code]
    harness.do(*refuse)
    try:
        harness.link.run(call)
        word = ""
    except RedisResponseError as error:
        word = error.code
    finally:
        harness.do(*accept)
    assert harness.dump() == before
    assert word == ("" if scenario in READ_ONLY else code)


def test_every_reply_word_has_a_test() -> None:
    """For each word in each header, some test expects it with `expect("script", "WORD", …)`."""
    demanded: set[tuple[str, str]] = set()
    in_entries: set[tuple[str, str]] = set()
    for path in HERE.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr == "expect":
                script, word = (ast.literal_eval(argument) for argument in node.args[:2])
                demanded.add((script, word))
            if node.func.attr in ("expect_entries", "expect_words"):
                script, words = (ast.literal_eval(argument) for argument in node.args[:2])
                in_entries |= {(script, word) for word in words}
                demanded.add((script, "OK"))
    for script in scripts.load().values():
        if script.name.endswith("_measure"):
            continue  # these models only read, and are tested together with their figures
        for word in script.values:
            assert (script.name, word) in demanded
        for word in script.entry_returns:
            assert (script.name, word) in in_entries
