"""A daemon handles entries from clients in any language. The snippets of the page run unchanged."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.support import fetch_node_redis
from tests.support.daemon import TOPIC, Daemon
from tests.support.servers import ProcessServer

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "wire-format.md"
PARTITIONS = 3

NOTE = """
import base64, json, os

from pathlib import Path


def note(message):
    if message.text() == '"once more"' and message.attempt == 1:
        raise OSError("told to fail")
    told = {
        "uid": message.uid, "partition": message.partition, "attempt": message.attempt,
        "payload": message.text(), "headers": message.headers,
        "key": None if message.key is None else base64.b64encode(message.key).decode(),
        "own": message.fields.get(b"own", b"").decode(),
    }
    file = Path("noted") / message.uid.replace("/", "-")
    file.with_suffix(".new").write_text(json.dumps(told))
    file.with_suffix(".new").rename(file.with_suffix(".json"))
"""


def snippet(language: str) -> str:
    """Return the snippet that the page shows for a language."""
    [found] = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(found)


def fail_or_skip(what: str) -> NoReturn:
    """Fail in CI, where a skipped test would go unnoticed, and skip the test elsewhere."""
    if os.environ.get("CI"):
        pytest.fail(what, pytrace=False)
    pytest.skip(what)


@pytest.fixture
def running(
    new_daemon: Callable[..., Daemon], new_server: Callable[..., ProcessServer]
) -> Iterator[tuple[Daemon, ProcessServer]]:
    """A running daemon with three partitions, on its own server that listens on a port."""
    server = new_server(tcp=True)
    daemon = new_daemon(
        redis_url=server.tcp_url,
        partitions=PARTITIONS,
        code=NOTE,
        consumer={"handler": "work:note", "backoff": {"base": "1ms"}},
    )
    (daemon.folder / "noted").mkdir()
    with daemon:
        yield daemon, server


def wait_records(daemon: Daemon, count: int) -> dict[str, dict[str, Any]]:
    """Wait until `count` messages are handled. Return the handler's records by payload."""
    folder = daemon.folder / "noted"
    daemon.wait_for(
        lambda: len(list(folder.glob("*.json"))) >= count, what=f"{count} messages are handled"
    )
    daemon.wait_settled()
    found = [json.loads(each.read_text()) for each in folder.glob("*.json")]
    return {each["payload"]: each for each in found}


KEYS = {
    "a": "customer-42",
    "b": "zürich 北京",
    "c": "123456789",
    "d": "two  words",
    "once more": "a/b:{c}",
}


def check(seen: dict[str, dict[str, Any]]) -> None:
    """Check the key, headers and attempt of each message.

    Its partition must be the one that streamqd would choose.
    """
    for word, key in KEYS.items():
        told = seen[json.dumps(word)]
        assert base64.b64decode(told["key"]).decode() == key
        assert told["partition"] == zlib.crc32(key.encode()) % PARTITIONS
        assert told["headers"] == {"from": "elsewhere", "ort": "Köln"}
        assert told["attempt"] == (2 if word == "once more" else 1)
    assert len({told["partition"] for told in seen.values()}) > 1


def test_entries_written_by_redis_cli_are_handled(
    running: tuple[Daemon, ProcessServer], tmp_path: Path
) -> None:
    daemon, server = running
    client = shutil.which("redis-cli") or shutil.which("valkey-cli")
    if client is None:
        fail_or_skip("there is neither redis-cli nor valkey-cli on PATH: install redis-tools")
    headers = json.dumps({"from": "elsewhere", "ort": "Köln"}, ensure_ascii=False)
    # The snippet's `redis-cli` must connect to this server, and may be the one of Valkey.
    wrapper = tmp_path / "bin" / "redis-cli"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {client} -p {server.port} "$@"\n')
    wrapper.chmod(0o755)
    script = snippet("sh") + 'while IFS="|" read -r key payload; do'
    script += f' send {TOPIC} "$key" "$payload" \'{headers}\'; done\n'
    # Other entries that a person may type by hand: without a key, without a payload, with extra
    # fields.
    stream = f"'stream:topic:{{{TOPIC}:p:2}}' '*'"
    script += f"redis-cli XADD {stream} own field payload plain\nredis-cli XADD {stream} own only\n"
    given = "".join(f"{key}|{json.dumps(word)}\n" for word, key in KEYS.items())

    ended = subprocess.run(
        ["sh", "-eu", "-c", script],
        env=os.environ | {"PATH": f"{wrapper.parent}:{os.environ['PATH']}"},
        input=given, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    ids = ended.stdout.split()
    assert len(ids) == len(KEYS) + 2
    seen = wait_records(daemon, len(ids))
    check({payload: told for payload, told in seen.items() if payload.startswith('"')})
    for payload, own in (("plain", "field"), ("", "only")):
        told = seen[payload]
        assert (told["key"], told["headers"], told["partition"]) == (None, {}, 2)
        assert told["own"] == own
    assert {told["uid"].rpartition("/")[2] for told in seen.values()} == set(ids)
    assert daemon.stop() == 0


def test_entries_written_by_node_redis_are_handled(
    running: tuple[Daemon, ProcessServer], tmp_path: Path
) -> None:
    daemon, server = running
    try:
        modules = fetch_node_redis.fetch()
    except fetch_node_redis.NoNodeError as error:
        fail_or_skip(str(error))
    folder = tmp_path / "node"
    folder.mkdir()
    (folder / "node_modules").symlink_to(modules)
    (folder / "send.mjs").write_text(
        snippet("js")
        + f"\nfor (const [word, key] of Object.entries({json.dumps(KEYS)}))\n"
        + "  console.log("
        + f"await send('{TOPIC}', key, word, {{ from: 'elsewhere', ort: 'Köln' }}));\n"
        + "await redis.close();\n"
    )

    ended = subprocess.run(
        ["node", "send.mjs"],
        cwd=folder, env=os.environ | {"REDIS_URL": server.tcp_url},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.split()) == len(KEYS)
    check(wait_records(daemon, len(KEYS)))
    assert daemon.stop() == 0
