"""Kill drivers, executors and Python workers of Spark pipelines at random moments.

The pipelines are an archive with its parsed tables, a query between two topics, and a replay of the
archive. The number of cores changes with every run. After every kill, an independent checker
(tests/support/row_ledger.py) finds no lost and no duplicate row. Skipped unless KILLS sets the
number of kills: `make soak NAME=spark`. With STORE=s3, the archive is in a bucket. ROWS is the
minimum number of rows of the archived topic. SEED repeats the random choices. RESULT names the
result file.
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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
import redis

from streamqd.store.client import Connection
from tests.support import copy_job, spark_process
from tests.support.killed_archive import POINTS
from tests.support.machine import processor
from tests.support.s3 import BucketServer
from tests.support.servers import Server
from tests.support.spark_process import QUICK, executors, family, need_spark, pipeline, read_output
from tests.support.waiting import wait_until

pytest.importorskip("deltalake")
from tests.support import row_ledger

pytestmark = [
    pytest.mark.timeout(7200),
    pytest.mark.skipif(
        "KILLS" not in os.environ, reason="a soak test: `make soak NAME=spark` runs it"
    ),
]

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("KILLS") or "20")
STORE = os.environ.get("STORE", "disk")
ROWS = int(os.environ.get("ROWS") or "0")
SEED = int(os.environ.get("SEED") or secrets.randbelow(1 << 32))
PARTITIONS = 3
PATIENCE = 900
STOPPED = 1  # exit code of a pipeline that Spark could not finish
MARK = "STREAMQD_SOAK"  # in the environment of all processes of this test
# The process to kill. For the driver: its Python process alone, or all of its processes.
# `point`: also the driver, at a named point while it publishes a batch.
STRIKES = {
    "archive": ("driver", "tree", "point", "executor", "python"),
    "parsed": ("driver", "tree", "executor", "python"),
    "sink": ("driver", "tree", "executor", "python"),
    "replay": ("driver", "tree", "executor", "python"),
}
LOCAL = [(0, cores) for cores in (1, 2, 3, 4)]
CLUSTERS = [(1, 2), (2, 1), (1, 3), (2, 2)]  # executors, cores of each


@dataclass(frozen=True)
class Kill:
    """One kill. `executors` is 0 if tasks run in the JVM of the driver."""

    work: str
    strike: str
    executors: int
    cores: int
    rows: int  # rows written before it


class Soak:
    """Topics with their ledgers, and the pipelines over them."""

    def __init__(self, server: Server, folder: Path, store: BucketServer | None) -> None:
        self.folder = folder
        self.client = redis.Redis.from_url(server.url)
        self.chance = random.Random(SEED)
        self.store = store
        self.archive = f"{folder}/archive" if store is None else "s3://bucket/archive"
        self.table = f"{self.archive}/tables/logs"
        self.config = folder / "streamq.toml"
        self.config.write_text(
            f'[redis]\nurl = "{server.url}"\n[pipelines.logs]\nschema = "{row_ledger.SCHEMA}"\n',
            "utf-8",
        )
        self.ledgers = {name: folder / f"{name}.ledger" for name in ("logs", copy_job.SOURCE)}
        for name in (*self.ledgers, copy_job.TARGET, "again"):
            self._streamqd("topic", "create", name, "--partitions", str(PARTITIONS))
        self.producers = [
            row_ledger.Producer(self.client, name, PARTITIONS, file, SEED)
            for name, file in self.ledgers.items()
        ]
        self.planned_rows = 4_000
        self.known = row_ledger.ReadCache()
        self.trimmed = 0
        self.home = spark_process.spark_home(folder)
        self._cores: dict[str, int] = {}

    def _streamqd(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "streamqd", "--config", str(self.config), *arguments]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)

    def add(self, most: int = 0) -> None:
        """Add rows to both topics: up to `most`, or as many as are planned."""
        for each, planned in zip(self.producers, (self.planned_rows, 4_000), strict=True):
            each.write(self.chance.randrange((most or planned) // 4, most or planned))

    def plan(self, runs: int) -> None:
        """Set the rows of the next run, to reach ROWS evenly in this number of runs."""
        left = ROWS - self.producers[0].written
        self.planned_rows = max(
            4_000, 8 * left // (5 * max(1, runs))
        )  # `add` writes 5/8 on average

    def complete(self) -> None:
        """Add the rows that are missing to reach ROWS."""
        self.producers[0].write(ROWS - self.producers[0].written)

    def trim(self) -> None:
        """Trim some partitions up to the position that is marked as archived in Redis."""
        for partition in range(PARTITIONS):
            ms, seq = row_ledger.entry_id_key(
                row_ledger.archived_position(self.client, "logs", partition)
            )
            if ms and self.chance.random() < 0.5:
                stream = row_ledger.stream("logs", partition)
                self.trimmed += self.client.xtrim(stream, minid=f"{ms}-{seq + 1}")

    # --- checks ---

    def check(self, *, whole: bool = False) -> None:
        """Check that no row is lost or duplicated. `whole` requires each row in every table."""
        if whole:
            self.known = row_ledger.ReadCache()
        known, client = self.known, self.client
        logs, orders = map(row_ledger.read_ledger, self.ledgers.values())
        table = row_ledger.read_table_rows(self.table, known)
        stream = row_ledger.read_stream_rows(client, "logs", PARTITIONS, known)
        names = [
            row_ledger.archived_position(client, "logs", number) for number in range(PARTITIONS)
        ]
        told = [row_ledger.entry_id_key(name) for name in names]
        archived = Counter(
            row for row in logs.elements() if row_ledger.entry_id_key(row.id) <= told[row.partition]
        )
        fits, does_not = row_ledger.read_parsed(self.ledgers["logs"])
        parsed = row_ledger.read_parsed_rows(f"{self.archive}/parsed/logs", known)
        quarantine = row_ledger.read_quarantine_rows(f"{self.archive}/quarantine/logs", known)
        copied = row_ledger.read_stream_rows(client, copy_job.TARGET, PARTITIONS, known)
        copies = Counter(row.content for row in copied.elements())
        ordered = Counter(row.content for row in orders.elements())
        origins = Counter((f"logs/{row.partition}/{row.id}", row.content) for row in logs)
        replayed = row_ledger.read_replayed_rows(client, "again", PARTITIONS, known)
        faults = [
            *row_ledger.find_faults("archive", table, logs, whole=whole),
            *row_ledger.find_faults("archive and stream", table | stream, logs, whole=True),
            *row_ledger.find_faults("what Redis was told", table & archived, archived, whole=True),
            *row_ledger.find_faults("parsed", parsed, fits, whole=whole),
            *row_ledger.find_faults("quarantine", quarantine, does_not, whole=whole),
            *row_ledger.find_faults("sink", copies, ordered, whole=whole),
            *row_ledger.find_faults("replay", replayed, origins, whole=whole),
        ]
        assert not faults, "\n".join(faults)

    # --- runs ---

    def command(self, work: str) -> list[str]:
        tier = self.chance.choice(("all", "cold"))
        batch = str(max(1000, self.planned_rows // 16))
        given = {
            "archive": ["archive", "--topic", "logs", "--batch-rows", batch],
            "parsed": ["archive", "--topic", "logs"],
            "sink": ["run", "tests.support.copy_job:copy", "--checkpoints", str(self.folder / "c")],
            "replay": ["replay", "logs", "--to-topic", "again", "--name", "again", "--from", tier],
        }
        archive = [] if work == "sink" else ["--archive", self.archive, "--json"]
        return [*given[work], *archive, *QUICK]

    def master(self, work: str, kind: str) -> tuple[int, int, list[str]]:
        """Return executors, total cores and arguments. The cores differ from the previous run."""
        shapes = {"executor": CLUSTERS, "python": LOCAL + CLUSTERS}.get(kind, LOCAL)
        others = [each for each in shapes if max(1, each[0]) * each[1] != self._cores.get(work)]
        number, each = self.chance.choice(others)
        self._cores[work] = cores = max(1, number) * each
        if not number:
            return 0, cores, ["--master", f"local[{cores}]"]
        cluster = f"local-cluster[{number},{each},1024]"
        return number, cores, ["--master", cluster, "--conf", "spark.executor.memory=512m"]

    def finish(self, work: str) -> None:
        """Run the pipeline until it has handled all rows."""
        *_, master = self.master(work, "")
        with pipeline(self.folder, self.config, *self.command(work), *master) as running:
            assert running.wait(PATIENCE) == 0, read_output(self.folder)

    def kill(self, work: str, kind: str) -> Kill | None:
        """Run the pipeline and kill it. Return None if it finished first."""
        number, cores, master = self.master(work, kind)
        command = [*self.command(work), *master]
        killed = self._at_a_point(command) if kind == "point" else self._struck(work, kind, command)
        rows = sum(each.written for each in self.producers)
        return Kill(work, kind, number, cores, rows) if killed else None

    def _at_a_point(self, command: list[str]) -> bool:
        point = [self.chance.choice([*POINTS]), str(self.chance.randint(1, 3))]
        ours = [sys.executable, "-m", "tests.support.killed_archive", *point]
        ours += ["--config", str(self.config), "pipeline", *command]
        ended = subprocess.run(ours, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
        assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
        return ended.returncode == -signal.SIGKILL

    def _struck(self, work: str, kind: str, command: list[str]) -> bool:
        works = self._sign(work)
        with pipeline(self.folder, self.config, *command, home=self.home) as running:
            while_starting = kind in ("driver", "tree") and self.chance.random() < 0.2
            if not while_starting:
                wait_until(
                    lambda: running.poll() is not None or works(),
                    timeout=PATIENCE, what=f"{work} works",
                )  # fmt: skip
                self.add(400)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(self.chance.uniform(0, 5 if while_starting else 1))
            struck = 0
            for each in self._victims(kind, running):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
                    struck += 1
            code = running.wait(PATIENCE)
            # A dead Python worker fails its task, which executors retry. If a tree is killed, a
            # worker may die first, so the driver may exit with that error before it is killed.
            allowed = {
                "python": (0, STOPPED),
                "executor": (0,),
                "tree": (0, STOPPED, -signal.SIGKILL),
            }.get(kind, (0, -signal.SIGKILL))
            assert code in allowed, f"{work}, {kind}: {code}\n{read_output(self.folder)}"
            if code == STOPPED:
                told = read_output(self.folder)
                assert told.startswith("Error: "), told
                assert len(told.splitlines()) == 1, told
        return struck > 0 if kind in ("python", "executor") else code == -signal.SIGKILL

    def _victims(self, kind: str, running: subprocess.Popen[str]) -> list[psutil.Process]:
        if kind in ("driver", "tree"):
            return family(running.pid)[: None if kind == "tree" else 1]
        found: Callable[[int], list[psutil.Process]] = executors if kind == "executor" else pythons
        there = wait_until(
            lambda: running.poll() is not None or found(running.pid),
            timeout=PATIENCE, what=f"there is a process of kind {kind}",
        )  # fmt: skip
        return [self.chance.choice(there)] if isinstance(there, list) else []

    def _sign(self, work: str) -> Callable[[], bool]:
        """Return a predicate that is True once a run started after this call has written."""
        kind = {"archive": "tables", "parsed": "parsed"}.get(work)
        if kind and self.store is not None:
            store = self.store
            store.requests()
            return lambda: any(f"/{kind}/" in each for each in store.requests() if _adds(each))
        if kind:
            began = time.time_ns()
            folder = Path(self.archive, kind)
            # Files of a killed run are older.
            return lambda: any(
                each.stat().st_ctime_ns > began for each in folder.rglob("*.parquet")
            )
        before = self._added()
        return lambda: self._added() > before

    def _added(self) -> int:
        """Return the number of XADD calls of the server."""
        stats = self.client.info("commandstats")
        return int(stats.get("cmdstat_xadd", {}).get("calls", 0))


def _adds(request: str) -> bool:
    """Return True for a request that writes a part of a Parquet file."""
    return request.startswith("PUT ") and request.endswith(".parquet")


def pythons(pid: int) -> list[psutil.Process]:
    """Return the Python processes below a driver, without the driver."""
    found = []
    for each in family(pid)[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.name().startswith("python"):
                found.append(each)
    return found


def marked_processes(mark: str) -> Iterator[psutil.Process]:
    """Return all processes that this test started, directly or indirectly."""
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if each.pid != os.getpid() and each.environ().get(MARK) == mark:
                yield each


def test_repeated_spark_kills_write_each_row_once(
    link: Connection,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need_spark()
    print(f"\nKILLS={KILLS} STORE={STORE} ROWS={ROWS} SEED={SEED}", flush=True)
    with contextlib.ExitStack() as stack:
        # It starts before the mark, because the server runs until the test is over.
        store = stack.enter_context(BucketServer()) if STORE == "s3" else None
        for name, value in ({} if store is None else store.environment).items():
            monkeypatch.setenv(name, value)
        mark = secrets.token_hex(8)
        monkeypatch.setenv(MARK, mark)
        _kill_and_check(Soak(server, tmp_path, store), server, mark, time.monotonic())


def _kill_and_check(soak: Soak, server: Server, mark: str, began: float) -> None:
    every = [(work, kind) for work, kinds in STRIKES.items() for kind in kinds]
    soak.chance.shuffle(every)
    wanted = [every[number % len(every)] for number in range(KILLS)]
    soak.chance.shuffle(wanted)
    kills: list[Kill] = []
    runs = 0
    soak.plan(1 + len(wanted))
    soak.add()
    soak.finish("archive")  # a replay needs one
    while wanted:
        runs += 1
        soak.plan(len(wanted))
        soak.add()
        work, kind = wanted.pop()
        killed = soak.kill(work, kind)
        if killed:
            kills.append(killed)
        else:
            wanted.insert(soak.chance.randint(0, len(wanted)), (work, kind))
        soak.check()
        soak.trim()
        soak.check()
        told = f"{len(kills)}/{KILLS} after {work} {kind}"
        print(f"{told}, {time.monotonic() - began:.0f} s: {killed}", flush=True)
    # The processes of a killed driver exit automatically.
    wait_until(
        lambda: not list(marked_processes(mark)), timeout=60, every=0.2, what="no process is left"
    )
    soak.complete()
    for work in STRIKES:
        soak.finish(work)
    soak.check(whole=True)
    _compare_by_spark(soak)
    _write_result(soak, server, kills, runs, round(time.monotonic() - began))


def _compare_by_spark(soak: Soak) -> None:
    """Check that SQL over archive and stream finds all rows, even those only in Redis."""
    soak.add()
    query = (
        "SELECT partition, count(*) AS entries, sum(crc32(CAST(id AS BINARY))) AS ids"
        " FROM topic_logs GROUP BY partition"
    )
    asked = ["sql", query, "--json", "--archive", soak.archive, *QUICK, "--master", "local[2]"]
    with pipeline(soak.folder, soak.config, *asked) as running:
        assert running.wait(PATIENCE) == 0, read_output(soak.folder)
    by_spark = json.loads((soak.folder / "pipeline.out").read_text())
    counts: Counter[int] = Counter()
    sums: Counter[int] = Counter()
    for row in row_ledger.read_ledger(soak.ledgers["logs"]).elements():
        counts[row.partition] += 1
        sums[row.partition] += zlib.crc32(row.id.encode())
    assert {each["partition"]: (each["entries"], each["ids"]) for each in by_spark} == {
        partition: (counts[partition], sums[partition]) for partition in counts
    }


def _write_result(soak: Soak, server: Server, kills: list[Kill], runs: int, seconds: int) -> None:
    if "RESULT" not in os.environ:
        return
    document = {
        "what": "after every kill: archive + stream = ledger, and no row twice in the archive, in"
        " the parsed table and its quarantine, in the target of a streaming query and in that of a"
        " replay; at the end each row once in each of them, and in Spark's answer over archive and"
        " stream; no process is left",
        "command": f"make soak NAME=spark STORE={STORE} ROWS={ROWS} KILLS={KILLS} SEED={SEED}",
        "date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}",
        "seed": SEED,
        "kills": len(kills),
        "killed": dict(sorted(Counter(f"{each.work} {each.strike}" for each in kills).items())),
        "runs": runs,
        "rows": {each.topic: each.written for each in soak.producers},
        "trimmed": soak.trimmed,
        "lost": 0,
        "duplicates": 0,
        "seconds": seconds,
        "machine": {
            "system": platform.system(),
            "cpu": processor(),
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / (1 << 30)),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("pyspark", "pyarrow", "deltalake", "redis")},
            "server": f"{server.product} {server.facts.version}",
        },
        "each": [asdict(each) for each in kills],
    }
    path = ROOT / os.environ["RESULT"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", "utf-8")
