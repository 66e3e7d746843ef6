"""The systems in the comparison: how each of them is installed, started and tuned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.benchmarks.peers import tuning
from tests.benchmarks.peers.tuning import Tuning

STREAMQ_TOML = """\
[redis]
url = "{redis}"
[daemon]
instance = "bench"
[http]
bind = ""
[topics.bench]
partitions = 2
[[consumers]]
topic = "bench"
group = "g"
handler = "streamqd_app:{handler}"
"""


@dataclass(frozen=True, slots=True, eq=False)
class System:
    """A way to run a system. `{bin}` is its environment, and `{folder}` is the run's own folder."""

    name: str
    app: str  # the module in apps/ that sends jobs
    package: str  # the package whose version is shown
    environment: str  # the file in requirements/; "" is the environment of this repository
    workers: tuple[tuple[str, ...], ...]
    jobs: int  # number of jobs per round, which is some seconds of work
    singles: int  # number of jobs that are sent one by one in a round
    survives: str  # the effect of a worker's crash on the jobs that it fetched
    tuning: Tuning
    env: Mapping[str, str] = field(default_factory=dict)
    config: str = ""  # the text of {folder}/streamq.toml
    prepare: tuple[str, ...] = ()
    node: bool = False
    clients: tuple[str, ...] = ("redis", "hiredis")  # Redis libraries whose versions are shown
    server: str = ""  # a binary of fetch_server.py; "" is the server that streamqd embeds


_DAEMON = ("{bin}/python", "-m", "streamqd", "--config", "{folder}/streamq.toml")
_CELERY = ("{bin}/celery", "-A", "celery_app", "worker", "--loglevel", "ERROR")
_QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")
_DRAMATIQ = ("{bin}/dramatiq", "dramatiq_app")
_RQ = ("{bin}/rq", "worker", "bench", "--url", "{redis}", "--logging_level", "ERROR")
_ARQ = ("{bin}/arq", "arq_app.WorkerSettings", "--custom-log-dict", "arq_app.LOGGING")
_TASKIQ = ("{bin}/taskiq", "worker", "taskiq_app:broker", "--workers", "2")
_TASKIQ_MORE = ("--max-async-tasks", "100", "--max-prefetch", "100", "--log-level", "ERROR")
_FASTSTREAM = ("{bin}/faststream", "run", "faststream_app:app", "--log-level", "error")
_GROUP = ("{bin}/python", "faststream_app.py")
_NODE = ("node", "bullmq_app.mjs", "work")
_AGAIN = "run again when random maintenance finds a heartbeat older than a minute"
_PENDING = "stay pending until a subscriber with `min_idle_time` claims them"
_IDLE = "run again after 30 seconds (`claim_min_idle_ms`)"
_HOUR = "run again after an hour (`visibility_timeout`)"
_PREPARE = (*_DAEMON, "topic", "create", "bench", "--partitions", "2")
_REDIS = "redis810"  # for ChasquiMQ, which needs Redis 8.6


def _limit(name: str, app: str, package: str, about: Tuning, clients: tuple[str, ...]) -> System:
    return System(
        name, app, package, "", (("{bin}/python", f"{app}.py"),), 1_000_000, 20_000,
        "stay pending forever", about, clients=clients,
    )  # fmt: skip


def _ours(name: str, handler: str, jobs: int, server: str = "") -> System:
    config = STREAMQ_TOML.replace("{handler}", handler)
    return System(
        name, "streamqd_app", "streamqd", "", (_DAEMON,), jobs, 20_000,
        "the running job runs again, the others continue", tuning.STREAMQD,
        config=config, prepare=_PREPARE, server=server,
    )  # fmt: skip


SYSTEMS = (
    _limit("baseline: raw hiredis", "raw_app", "hiredis", tuning.RAW, ("hiredis",)),
    _limit("baseline: redis-py loop", "bare_app", "redis", tuning.BARE, ("redis", "hiredis")),
    _ours("streamqd", "job", 1_000_000),
    _ours("streamqd, batch handler", "jobs", 1_000_000),
    System("Celery, prefork", "celery_app", "celery", "celery",
           ((*_CELERY, "--pool", "prefork", "--concurrency", "2", *_QUIET),),
           5_000, 2_000, f"one child: run again immediately, all: {_HOUR}", tuning.CELERY),
    System("Celery, two solo workers", "celery_app", "celery", "celery",
           tuple((*_CELERY, "--pool", "solo", *_QUIET, "--hostname", name) for name in ("a", "b")),
           8_000, 2_000, _HOUR, tuning.CELERY),
    System("Dramatiq", "dramatiq_app", "dramatiq", "dramatiq",
           ((*_DRAMATIQ, "--processes", "2"),),
           12_000, 5_000, _AGAIN, tuning.DRAMATIQ, env={"BENCH_THREADS": "1"}),
    System("Dramatiq, tuned", "dramatiq_app", "dramatiq", "dramatiq",
           ((*_DRAMATIQ, "--processes", "2", "--threads", "1"),),
           30_000, 5_000, _AGAIN, tuning.DRAMATIQ_TUNED,
           env={"BENCH_TUNED": "1", "dramatiq_queue_prefetch": "500"}),
    System("RQ, simple workers", "rq_app", "rq", "rq",
           ((*_RQ, "--worker-class", "rq.worker.SimpleWorker"),) * 2,
           1_500, 2_000, "run again after the next maintenance, every ten minutes (`Retry`)",
           tuning.RQ),
    System("RQ, a fork per job", "rq_app", "rq", "rq", (_RQ,) * 2,
           300, 2_000, "run again (`Retry`)", tuning.RQ_FORK),
    System("arq", "arq_app", "arq", "arq", (_ARQ,) * 2,
           8_000, 2_000, "run again after five minutes", tuning.ARQ),
    System("taskiq, list", "taskiq_app", "taskiq", "taskiq", ((*_TASKIQ, *_TASKIQ_MORE),),
           20_000, 5_000, "lost", tuning.TASKIQ_LIST),
    System("taskiq, stream", "taskiq_app", "taskiq", "taskiq", ((*_TASKIQ, *_TASKIQ_MORE),),
           20_000, 5_000, "run again after ten minutes", tuning.TASKIQ_STREAM,
           env={"BENCH_STREAM": "1"}),
    System("streaq", "streaq_app", "streaq", "streaq",
           (("{bin}/streaq", "run", "streaq_app:worker"),) * 2,
           10_000, 5_000, "run again after a minute", tuning.STREAQ,
           env={"COREDIS_OPTIMIZED": "true"}, clients=("coredis",)),
    System("huey", "huey_app", "huey", "huey",
           (("{bin}/huey_consumer", "huey_app.huey", "--workers", "2",
             "--worker-type", "process", "--quiet"),),
           20_000, 10_000, "lost", tuning.HUEY),
    System("FastStream", "faststream_app", "faststream", "faststream", (_FASTSTREAM,) * 2,
           30_000, 10_000, _PENDING, tuning.FASTSTREAM, prepare=_GROUP),
    System("FastStream, batch handler", "faststream_app", "faststream", "faststream",
           (_FASTSTREAM,) * 2, 400_000, 10_000, _PENDING, tuning.FASTSTREAM_BATCH,
           env={"BENCH_BATCH": "1"}, prepare=_GROUP),
    System("BullMQ", "bullmq_app.mjs", "bullmq", "bullmq", (_NODE,) * 2,
           60_000, 5_000, "run again after a minute", tuning.BULLMQ, node=True,
           clients=("ioredis",)),
    System("ChasquiMQ", "chasquimq_app", "chasquimq", "chasquimq",
           (("{bin}/python", "chasquimq_app.py"),) * 2,
           300_000, 10_000, _IDLE, tuning.CHASQUIMQ, clients=("fred",), server=_REDIS),
    _ours("streamqd, on the server of ChasquiMQ", "job", 1_000_000, _REDIS),
)  # fmt: skip


def select_systems(parts: list[str]) -> list[System]:
    """Return the systems whose names contain one of these parts, or all if there are no parts."""
    return [
        each
        for each in SYSTEMS
        if not parts or any(part.lower() in each.name.lower() for part in parts)
    ]
