"""What is compared: how each system is installed, started and tuned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True)
class System:
    """One way to run one system. `{bin}` is its environment, `{folder}` the run's own folder."""

    name: str
    app: str  # the module in apps/ that sends
    environment: str  # the file in requirements/; "" is the environment of this repository
    workers: tuple[tuple[str, ...], ...]
    jobs: int  # of one round: some seconds of work
    singles: int  # sent one by one in one round
    survives: str  # what a crash of a worker process does to the jobs that it has in hand
    env: Mapping[str, str] = field(default_factory=dict)
    config: str = ""  # text of {folder}/streamq.toml
    prepare: tuple[str, ...] = ()
    node: bool = False


_DAEMON = ("{bin}/python", "-m", "streamqd", "--config", "{folder}/streamq.toml")
_CELERY = ("{bin}/celery", "-A", "celery_app", "worker", "--loglevel", "ERROR")
_QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")
_DRAMATIQ = ("{bin}/dramatiq", "dramatiq_app")
_RQ = ("{bin}/rq", "worker", "bench", "--url", "{redis}", "--logging_level", "ERROR")
_TASKIQ = ("{bin}/taskiq", "worker", "taskiq_app:broker", "--workers", "2")
_TASKIQ_MORE = ("--max-async-tasks", "100", "--max-prefetch", "100", "--log-level", "ERROR")
_FASTSTREAM = ("{bin}/faststream", "run", "faststream_app:app", "--log-level", "error")
_GROUP = ("{bin}/python", "faststream_app.py")
_NODE = ("node", "bullmq_app.mjs", "work")
_AGAIN = "run again"
_PREPARE = (*_DAEMON, "topic", "create", "bench", "--partitions", "2")


def _ours(name: str, handler: str, jobs: int) -> System:
    config = STREAMQ_TOML.replace("{handler}", handler)
    return System(
        name, "streamqd_app", "", (_DAEMON,), jobs, 20_000,
        "what ran is run again, the rest goes on", config=config, prepare=_PREPARE,
    )  # fmt: skip


SYSTEMS = (
    System("the limit: a bare loop", "bare_app", "", (("{bin}/python", "bare_app.py"),),
           1_000_000, 20_000, "stay pending for ever"),
    _ours("streamqd", "job", 1_000_000),
    _ours("streamqd, batch handler", "jobs", 1_000_000),
    System("Celery, prefork", "celery_app", "celery",
           ((*_CELERY, "--pool", "prefork", "--concurrency", "2", *_QUIET),),
           5_000, 2_000, "of a child: fails; of all: run again after an hour"),
    System("Celery, two solo workers", "celery_app", "celery",
           tuple((*_CELERY, "--pool", "solo", *_QUIET, "--hostname", name) for name in ("a", "b")),
           8_000, 2_000, "run again after an hour (visibility timeout)"),
    System("Dramatiq", "dramatiq_app", "dramatiq",
           ((*_DRAMATIQ, "--processes", "2"),),
           12_000, 5_000, _AGAIN, env={"BENCH_THREADS": "1"}),
    System("Dramatiq, tuned", "dramatiq_app", "dramatiq",
           ((*_DRAMATIQ, "--processes", "2", "--threads", "1"),),
           30_000, 5_000, _AGAIN,
           env={"BENCH_TUNED": "1", "dramatiq_queue_prefetch": "500"}),
    System("RQ, simple workers", "rq_app", "rq",
           tuple((*_RQ, "--worker-class", "rq.worker.SimpleWorker", "--name", name)
                 for name in ("a", "b")),
           1_500, 2_000, "marked as failed"),
    System("RQ, a fork per job", "rq_app", "rq",
           tuple((*_RQ, "--name", name) for name in ("a", "b")),
           300, 2_000, "marked as failed"),
    System("arq", "arq_app", "arq",
           (("{bin}/arq", "arq_app.WorkerSettings"),) * 2,
           8_000, 2_000, "run again after five minutes"),
    System("taskiq, list", "taskiq_app", "taskiq", ((*_TASKIQ, *_TASKIQ_MORE),),
           20_000, 5_000, "lost"),
    System("taskiq, stream", "taskiq_app", "taskiq", ((*_TASKIQ, *_TASKIQ_MORE),),
           20_000, 5_000, "run again after ten minutes", env={"BENCH_STREAM": "1"}),
    System("streaq", "streaq_app", "streaq",
           (("{bin}/streaq", "run", "streaq_app:worker"),) * 2,
           10_000, 5_000, "run again after a minute"),
    System("huey", "huey_app", "huey",
           (("{bin}/huey_consumer", "huey_app.huey", "--workers", "2",
             "--worker-type", "process", "--quiet"),),
           20_000, 10_000, "lost"),
    System("FastStream", "faststream_app", "faststream", (_FASTSTREAM,) * 2,
           30_000, 10_000, "stay pending", prepare=_GROUP),
    System("FastStream, batch handler", "faststream_app", "faststream", (_FASTSTREAM,) * 2,
           400_000, 10_000, "stay pending", env={"BENCH_BATCH": "1"},
           prepare=_GROUP),
    System("BullMQ", "bullmq_app.mjs", "bullmq", (_NODE,) * 2,
           60_000, 5_000, "run again after a minute", node=True),
)  # fmt: skip
