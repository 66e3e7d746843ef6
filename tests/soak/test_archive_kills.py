"""SIGKILL of the archive's driver at points and moments of chance; then all is there, once.

Skipped unless KILLS says how often: `KILLS=20 pytest tests/soak/test_archive_kills.py`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from streamqd.config import Topic
from streamqd.store import topics
from streamqd.store.client import Link
from streamqd.store.keys import Keys
from tests.support.killed_archive import POINTS
from tests.support.servers import Server

dataset = pytest.importorskip("pyarrow.dataset")
pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif("KILLS" not in os.environ, reason="a soak test: KILLS=20 runs it"),
]

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("KILLS", "20"))
SEED = int(os.environ.get("SEED", "1"))
PARTITIONS = 3


def add(link: Link, keys: Keys, chance: random.Random, ledger: Counter[tuple[int, str]]) -> None:
    for partition in range(PARTITIONS):
        count = chance.randrange(2_000)
        if count:
            key = keys.stream("access", partition)
            commands = [("XADD", key, "*", "payload", b"x" * 200) for _ in range(count)]
            ledger.update((partition, entry.decode()) for entry in link.pipeline(commands))


def test_killed_again_and_again(link: Link, keys: Keys, server: Server, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    folder = tmp_path / "archive"
    (tmp_path / "streamq.toml").write_text(f'[redis]\nurl = "{server.url}"\n', "utf-8")
    topics.create(link, keys, "access", Topic(partitions=PARTITIONS))
    ledger: Counter[tuple[int, str]] = Counter()
    verb = ["--config", str(tmp_path / "streamq.toml"), "pipeline", "archive", "--json"]
    verb += ["--archive", str(folder), "--batch-rows", "1000", "--master", "local[2]"]
    killed = 0

    def seen() -> Counter[tuple[int, str]]:
        if not any(folder.glob("topic=*")):
            return Counter()
        found = dataset.dataset(folder, format="parquet", partitioning="hive").to_table()
        return Counter(zip(found["partition"].to_pylist(), found["id"].to_pylist(), strict=True))

    while killed < KILLS:
        add(link, keys, chance, ledger)
        if chance.random() < 0.5:
            point = [chance.choice(sorted(POINTS)), str(chance.randint(1, 3))]
            command = [sys.executable, "-m", "tests.support.killed_archive", *point, *verb]
            ended = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300)
            code = ended.returncode
        else:
            running = subprocess.Popen(
                [sys.executable, "-m", "streamqd", *verb], cwd=ROOT, stdout=subprocess.DEVNULL
            )
            try:
                code = running.wait(timeout=chance.uniform(4, 25))
            except subprocess.TimeoutExpired:
                running.kill()
                code = running.wait()
        assert code in (0, -signal.SIGKILL)
        killed += code == -signal.SIGKILL
        found = seen()
        assert max(found.values(), default=1) == 1, "nobody ever sees a row twice"
        assert found <= ledger
    last = subprocess.run(
        [sys.executable, "-m", "streamqd", *verb], cwd=ROOT, capture_output=True, timeout=300
    )
    assert last.returncode == 0, last.stderr
    assert seen() == ledger
    archived = json.loads(last.stdout)["topics"][0]["archived"]
    assert set(archived) == {str(each) for each, _ in ledger}
