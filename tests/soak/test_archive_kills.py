"""SIGKILL of the archive's driver and executors, at points and moments of chance.

And all is there, once. Skipped unless KILLS says how often: `make soak NAME=archive`. SEED repeats
a run's choices; RESULT names a file for what came of it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import platform
import random
import secrets
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from streamqd.config import Topic
from streamqd.spark.offsets import read_id, successor, write_id
from streamqd.spark.pipelines.storage import Archive
from streamqd.store import topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.support import spark_process
from tests.support.killed_archive import POINTS
from tests.support.servers import Server
from tests.support.spark_process import CLUSTER, QUICK, executors, need_spark, pipeline, said
from tests.support.waiting import wait_until

dataset = pytest.importorskip("pyarrow.dataset")
pytestmark = [
    pytest.mark.timeout(7200),
    pytest.mark.skipif(
        "KILLS" not in os.environ, reason="a soak test: `make soak NAME=archive` runs it"
    ),
]

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("KILLS") or "20")
SEED = int(os.environ.get("SEED") or secrets.randbelow(1 << 32))
PARTITIONS = 3
PATIENCE = 300
# What is killed: the driver at one of four points of publishing, or at some moment of its work, or
# an executor at some moment.
KINDS = (*POINTS, "moment", "moment", "executor", "executor")
Entry = tuple[int, str]  # partition, id


class Soak:
    """A topic, its ledger, an archive that is killed, and retention that follows it."""

    def __init__(self, link: Connection, keys: Keys, server: Server, folder: Path) -> None:
        self.link, self.keys, self.folder = link, keys, folder
        self.chance = random.Random(SEED)
        self.archive = folder / "archive"
        self.config = folder / "streamq.toml"
        self.config.write_text(f'[redis]\nurl = "{server.url}"\n', "utf-8")
        self.ledger: Counter[Entry] = Counter()
        self.trimmed = 0
        topics.create(Store(link, keys), "access", Topic(partitions=PARTITIONS))
        self.verb = ["archive", "--json", "--archive", str(self.archive), "--batch-rows", "1000"]
        self.verb += [*QUICK, "--master"]

    def add(self) -> None:
        for partition in range(PARTITIONS):
            count = self.chance.randrange(500, 2_000)
            command = ("XADD", self.keys.stream("access", partition), "*", "payload", b"x" * 200)
            entries = self.link.pipeline([command] * count)
            self.ledger.update((partition, entry.decode()) for entry in entries)

    def trim(self) -> None:
        """Let retention take of some partitions what Redis was told to be archived."""
        for partition in range(PARTITIONS):
            archived = self.link.execute("HGET", self.keys.trim("access", partition), "archived")
            if archived and self.chance.random() < 0.5:
                stream = self.keys.stream("access", partition)
                keep_from = write_id(successor(read_id(archived)))
                self.trimmed += self.link.execute("XTRIM", stream, "MINID", "=", keep_from)

    def plain(self) -> Counter[Entry]:
        """What a reader of Parquet sees that knows nothing of us."""
        if not any(self.archive.glob("topic=*")):
            return Counter()
        found = dataset.dataset(self.archive, format="parquet", partitioning="hive").to_table()
        return Counter(zip(found["partition"].to_pylist(), found["id"].to_pylist(), strict=True))

    def in_redis(self) -> set[Entry]:
        found = set()
        for partition in range(PARTITIONS):
            entries = self.link.execute("XRANGE", self.keys.stream("access", partition), "-", "+")
            found |= {(partition, entry.decode()) for entry, _ in entries}
        return found

    def check(self) -> None:
        """Nobody sees a row twice, and none is in neither."""
        seen = self.plain()
        assert max(seen.values(), default=1) == 1
        assert seen <= self.ledger
        assert seen.keys() | self.in_redis() == self.ledger.keys()

    # --- kills ---

    def kill(self, kind: str, home: Path) -> bool:
        """Run the archive and kill; return whether that came before it was done."""
        if kind == "executor":
            return self._kill_executor(home)
        if kind == "moment":
            return self._kill_at_some_moment()
        point = [kind, str(self.chance.randint(1, 3))]
        command = [sys.executable, "-m", "tests.support.killed_archive", *point]
        command += ["--config", str(self.config), "pipeline", *self.verb, "local[2]"]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
        assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
        return ended.returncode == -signal.SIGKILL

    def _kill_at_some_moment(self) -> bool:
        with pipeline(self.folder, self.config, *self.verb, "local[2]") as running:
            if self.chance.random() < 0.7:  # else while it starts
                self._wait_until_it_works(running)
            try:
                running.wait(self.chance.uniform(0, 2))
            except subprocess.TimeoutExpired:
                running.kill()
            code = running.wait(PATIENCE)
        assert code in (0, -signal.SIGKILL), said(self.folder)
        return code == -signal.SIGKILL

    def _kill_executor(self, home: Path) -> bool:
        memory = ("--conf", "spark.executor.memory=512m")
        killed = False
        with pipeline(self.folder, self.config, *self.verb, CLUSTER, *memory, home=home) as running:
            self._wait_until_it_works(running)
            try:
                running.wait(self.chance.uniform(0, 1))
            except subprocess.TimeoutExpired:
                there = wait_until(
                    lambda: running.poll() is not None or executors(running.pid)[:2],
                    timeout=PATIENCE, what="an executor",
                )  # fmt: skip
                if isinstance(there, list):
                    self.chance.choice(there).kill()
                    killed = True
            # Spark begins another, and does again what the first had begun.
            assert running.wait(PATIENCE) == 0, said(self.folder)
        return killed

    def _wait_until_it_works(self, running: subprocess.Popen[str]) -> None:
        began = time.time_ns()
        staging = self.archive / "_staging" / "access"

        def works() -> bool:
            # What a killed run has left there is older.
            with contextlib.suppress(FileNotFoundError):
                return any(each.stat().st_ctime_ns > began for each in staging.iterdir())
            return False

        wait_until(
            lambda: works() or running.poll() is not None,
            timeout=PATIENCE, what="the first batch is being written",
        )  # fmt: skip


def test_killed_again_and_again(
    link: Connection, keys: Keys, server: Server, tmp_path: Path
) -> None:
    need_spark()
    print(f"\nKILLS={KILLS} SEED={SEED}", flush=True)
    began = time.monotonic()
    soak = Soak(link, keys, server, tmp_path)
    home = spark_process.spark_home(tmp_path)
    wanted = [KINDS[number % len(KINDS)] for number in range(KILLS)]
    soak.chance.shuffle(wanted)
    killed: Counter[str] = Counter()
    rounds = 0
    while wanted:
        rounds += 1
        soak.add()
        kind = wanted.pop()
        if soak.kill(kind, home):
            killed[kind] += 1
        else:
            wanted.insert(soak.chance.randint(0, len(wanted)), kind)
        soak.check()
        soak.trim()
        soak.check()
        print(f"{killed.total()}/{KILLS} after {kind}: {len(soak.ledger):,} entries", flush=True)
    with pipeline(tmp_path, soak.config, *soak.verb, "local[2]") as running:
        assert running.wait(PATIENCE) == 0, said(tmp_path)
    assert soak.plain() == soak.ledger

    soak.add()  # some that are in Redis only
    query = (
        "SELECT partition, count(*) AS entries, sum(crc32(CAST(id AS BINARY))) AS ids"
        " FROM topic_access GROUP BY partition"
    )
    asked = ["sql", query, "--json", "--archive", str(soak.archive), *QUICK, "--master", "local[2]"]
    with pipeline(tmp_path, soak.config, *asked) as running:
        assert running.wait(PATIENCE) == 0, said(tmp_path)
    by_spark = json.loads((tmp_path / "pipeline.out").read_text())
    counts: Counter[int] = Counter(partition for partition, _ in soak.ledger)
    sums: Counter[int] = Counter()
    for partition, entry in soak.ledger:
        sums[partition] += zlib.crc32(entry.encode())
    assert {each["partition"]: (each["entries"], each["ids"]) for each in by_spark} == {
        partition: (counts[partition], sums[partition]) for partition in counts
    }
    _write_result(soak, server, killed, rounds, round(time.monotonic() - began))


def _write_result(
    soak: Soak, server: Server, killed: Counter[str], rounds: int, seconds: int
) -> None:
    if "RESULT" not in os.environ:
        return
    document = {
        "what": "archive + stream = ledger after every kill, each entry once for a plain reader of"
        " Parquet; at the end the same for Spark over archive and stream",
        "command": f"make soak NAME=archive KILLS={KILLS} SEED={SEED}",
        "date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}",
        "seed": SEED,
        "kills": killed.total(),
        "killed": dict(sorted(killed.items())),
        "rounds": rounds,
        "entries": len(soak.ledger),
        "trimmed": soak.trimmed,
        "batches": len(Archive(soak.archive).current("access")),
        "lost": 0,
        "duplicates": 0,
        "seconds": seconds,
        "machine": {
            "system": platform.system(),
            "cpu": platform.machine(),
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / (1 << 30)),
        },
        "versions": {
            "python": platform.python_version(),
            "pyspark": version("pyspark"),
            "pyarrow": version("pyarrow"),
            "server": f"{server.product} {server.facts.version}",
        },
    }
    path = ROOT / os.environ["RESULT"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", "utf-8")
