"""The SQL prompt, in a terminal and in a pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.conftest import Shop
from tests.support.spark_process import QUICK, need_spark
from tests.support.terminal import Terminal

PATIENCE = 120.0
REFUSED = 8


@pytest.fixture
def command(shop: Shop, tmp_path: Path) -> list[str]:
    need_spark()
    shop.topic("orders", 2)
    shop.fill("orders", 0, 1, 3)
    shop.fill("orders", 1, 4, 5)
    (tmp_path / "streamq.toml").write_text(f'[redis]\nurl = "{shop.server.url}"\n')
    return [sys.executable, "-m", "streamqd", "pipeline", "shell", "--master", "local[2]", *QUICK]


def test_shell_prompts_in_a_terminal(command: list[str], tmp_path: Path) -> None:
    env = {**os.environ, "TERM": "dumb"}
    with Terminal(command, cwd=tmp_path, env=env, lines=100) as seen:
        seen.wait_text("streamqd>", PATIENCE)
        seen.type("select count(*) as found\nfrom topic_orders;\n")
        seen.wait_text("FOUND\n    5", PATIENCE)
        seen.type("select nothing from topic_orders;\n")
        seen.wait_text("Error: A column, variable, or function parameter with name", PATIENCE)
        # Ctrl-C would discard text that is typed before the prompt appears.
        seen.wait_for(lambda: seen.shown.rstrip().endswith("streamqd>"), "a prompt", PATIENCE)
        seen.wait_for(lambda: not seen.echoes, "the prompt reads", PATIENCE)
        seen.type("select sum(a.id % 7) from range(1000000000000) a, range(10) b;\n")
        prompts = seen.shown.count("streamqd>")
        seen.wait_for(lambda: seen.echoes, "the query runs", PATIENCE)
        seen.type("\x03")
        seen.wait_text("canceled", PATIENCE)
        seen.wait_for(lambda: seen.shown.count("streamqd>") > prompts, "a prompt", PATIENCE)
        seen.type("select sum(id) as answer from range(10);\n")  # a job, which needs a free core
        seen.wait_text("ANSWER\n    45", PATIENCE)
        seen.wait_for(lambda: seen.shown.rstrip().endswith("streamqd>"), "a prompt", PATIENCE)
        seen.type("\x04")
        assert seen.wait_end(PATIENCE) == 0
        assert "Traceback" not in seen.shown


def run_piped(command: list[str], folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, input=text, text=True, capture_output=True, timeout=PATIENCE
    )


def test_shell_reads_statements_from_a_pipe(shop: Shop, command: list[str], tmp_path: Path) -> None:
    statements = (
        "CREATE TABLE orders USING streamq OPTIONS (topic 'orders');\n"  # as in streamq.toml
        "INSERT INTO orders (key, value) VALUES (binary('k'), binary('new')); -- one more\n"
        "SELECT string(key) AS key, string(value) AS value FROM orders WHERE key IS NOT NULL;"
        "SELECT array(1, 2) AS key, 'a\"b' AS value"
    )
    as_json = run_piped([*command, "--format", "json"], tmp_path, statements)
    assert as_json.returncode == 0, as_json.stderr
    assert [json.loads(line) for line in as_json.stdout.splitlines()] == [
        {"key": "k", "value": "new"},
        {"key": [1, 2], "value": 'a"b'},
    ]
    as_csv = run_piped([*command, "--format", "csv"], tmp_path, "SELECT array(1) AS a, 'x,y' AS b")
    assert as_csv.stdout == 'a,b\n[1],"x,y"\n'

    stopped = run_piped(
        command, tmp_path, "SELECT 1 AS one; SELECT * FROM nothing; SELECT 2 AS two;"
    )
    assert stopped.returncode == REFUSED
    assert "nothing" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert "ONE" in stopped.stdout
    assert "TWO" not in stopped.stdout


def test_password_never_reaches_spark(command: list[str], tmp_path: Path) -> None:
    conf = ["--conf", "spark.eventLog.enabled=true", "--conf", f"spark.eventLog.dir={tmp_path}"]
    conf += ["--conf", "spark.eventLog.compress=false"]
    statement = "CREATE TABLE t USING streamq OPTIONS (url 'redis://u:hunter-two@h', topic 't')"

    done = run_piped([*command, *conf], tmp_path, statement)

    assert done.returncode == REFUSED
    assert "passwordFile" in done.stderr
    logs = [each for each in tmp_path.rglob("events_*") if each.is_file()]
    assert logs
    assert not any(b"hunter-two" in each.read_bytes() for each in logs)
