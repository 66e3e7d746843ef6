"""Write the figures in README.md and docs/README.zh-CN.md.

The figures are placed between two marks, and the rest of the pages is handwritten. `make bench
NAME=page` writes them from benchmarks/peers.json and survival.json. Without the first file, the
space between the marks is empty. Without the second one, a column is missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks import markdown

ROOT = Path(__file__).parents[3]
BEGIN = "<!-- figures: written by make bench NAME=page -->"
END = "<!-- end of the figures -->"
LIMIT = "baseline: redis-py loop"
RAW = "baseline: raw hiredis"
SHOWN = (
    "streamqd",
    "FastStream, batch handler",
    "Dramatiq, tuned",
    "Celery, prefork",
    "RQ, simple workers",
)
COLUMNS = (
    ("handled/s", ",.0f"),
    ("latency p50 ms", ",.1f"),
    ("latency p99 ms", ",.1f"),
    ("worker CPU us/job", ",.0f"),
    ("PSS MiB per worker", ",.0f"),
)
HEADS = (
    "messages/s",
    "latency p50",
    "latency p99",
    "worker CPU per message",
    "memory per worker",
)
UNITS = ("", " ms", " ms", " µs", " MiB")

ENGLISH = """\
{table}

Each figure is the median of {rounds} rounds on {date} ({cores} cores, {cpu}, {server}){killed}.
[Benchmarks](docs/explanation/benchmarks.md) shows all systems and figures.
"""
CHINESE = """\
{table}

数据为 {rounds} 轮测试的中位数（{date}，{cores} 核 {cpu}，{server}）{killed}。
全部系统与数据见[基准测试](explanation/benchmarks.md)。
"""  # noqa: RUF001 - Chinese punctuation
CHINESE_HEADS = ("消息/秒", "延迟 p50", "延迟 p99", "每条消息的工作进程 CPU", "每个工作进程内存")
KILLED_HEAD = "message of a killed worker runs again"
KILLED_TEXT = ". The last column is from one run of `make bench NAME=survival`"
KILLED_CHINESE_TEXT = "，最后一列为 `make bench NAME=survival` 的单次结果"  # noqa: RUF001
KILLED_CHINESE_HEAD = "被杀进程的消息何时重新执行"
# Parts of cells, in the words of the Chinese page.
CHINESE_CELLS = {
    "FastStream, batch handler (": "FastStream，批量处理函数 (",  # noqa: RUF001
    "Dramatiq, tuned (": "Dramatiq，调优 (",  # noqa: RUF001
    "Celery, prefork (": "Celery，prefork (",  # noqa: RUF001
    "RQ, simple workers (": "RQ，SimpleWorker (",  # noqa: RUF001
}
CHINESE_TIMES = {"s": "秒", "min": "分钟"}
MINUTE_S = 60.0

Results = dict[str, Any]


def _english(results: Results, survival: Results | None) -> str:
    return _fill(ENGLISH, results, survival, ("", *HEADS, KILLED_HEAD), KILLED_TEXT)


def _chinese(results: Results, survival: Results | None) -> str:
    heads = ("", *CHINESE_HEADS, KILLED_CHINESE_HEAD)
    text = _fill(CHINESE, results, survival, heads, KILLED_CHINESE_TEXT)
    for english, chinese in CHINESE_CELLS.items():
        text = text.replace(english, chinese)
    text = re.sub(
        r"\| not within (\S+) (s|min) \|",
        lambda cell: f"| {cell[1]} {CHINESE_TIMES[cell[2]]}内未重新执行 |",
        text,
    )
    return re.sub(
        r"\| after (\S+) (s|min) \|",
        lambda cell: f"| {cell[1]} {CHINESE_TIMES[cell[2]]}后 |",
        text,
    )


PAGES: dict[Path, Callable[[Results, Results | None], str]] = {
    Path("README.md"): _english,
    Path("docs/README.zh-CN.md"): _chinese,
}


def version(name: str, about: Results) -> str:
    """Return the version that a row shows. For the baseline, it is that of its client library."""
    return f"redis-py {about['version']}" if name == LIMIT else str(about["version"])


def format_rerun(name: str, survival: Results) -> str:
    """Return when the killed worker's job ran again, or that it did not run within the patience."""
    after = survival["systems"][name]["struck_again_s"]
    if after is None:
        return f"not within {survival['patience_minutes']:g} min"
    return f"after {format_seconds(after)}"


def format_seconds(time_s: float) -> str:
    """Return a time in a form for readers."""
    if time_s < 1:
        return f"{time_s:.2f} s"
    return f"{time_s:.1f} s" if time_s < MINUTE_S else f"{time_s / MINUTE_S:.1f} min"


def _fill(
    text: str, results: Results, survival: Results | None, heads: tuple[str, ...], killed: str
) -> str:
    rows = _rows(results["systems"], survival)
    table = markdown.table(heads if survival else heads[:-1], rows)
    told = {"rounds": results["rounds"], "date": results["date"], **results["machine"]}
    return text.format(table=table, killed=killed if survival else "", **told)


def _rows(systems: Results, survival: Results | None) -> Iterator[list[str]]:
    for name in SHOWN:
        if name not in systems:
            continue
        each = systems[name]
        cells = [
            format(each["figures"][key]["median"], form) + unit
            for (key, form), unit in zip(COLUMNS, UNITS, strict=True)
        ]
        if survival:
            cells.append(format_rerun(name, survival) if name in survival["systems"] else "")
        yield [f"{name} ({version(name, each)})", *cells]


def read_figures(text: str) -> str:
    """Return the part of a page between its marks."""
    begin, end = text.index(BEGIN) + len(BEGIN) + 1, text.index(END)
    return text[begin:end]


def replace_figures(text: str, figures: str) -> str:
    """Return a page with these figures between its marks."""
    begin, end = text.index(BEGIN) + len(BEGIN) + 1, text.index(END)
    return f"{text[:begin]}{figures}{text[end:]}"


def expected_figures(path: Path, results: Results | None, survival: Results | None) -> str:
    """Return the text that must be between a page's marks, or '' if nothing was measured yet."""
    return "\n" + PAGES[path](results, survival) + "\n" if results else ""


def write(results: Results, survival: Results | None, root: Path = ROOT) -> None:
    """Write the figures to all pages."""
    for path in PAGES:
        page = root / path
        figures = expected_figures(path, results, survival)
        page.write_text(replace_figures(page.read_text(), figures))
