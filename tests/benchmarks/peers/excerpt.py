"""The figures that README.md and docs/README.zh-CN.md show, and the line of docs/index.md.

They stand between two marks, so that the rest of the pages is written by people. `make bench-page`
puts them there from benchmarks/peers.json; without results there is nothing between the marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
BEGIN = "<!-- figures: written by make bench-page -->"
END = "<!-- end of the figures -->"
LIMIT = "the limit: a bare loop"  # of redis-py
SHOWN = (
    LIMIT,
    "streamqd",
    "streamqd, batch handler",
    "FastStream, batch handler",
    "BullMQ",
    "Dramatiq, tuned",
    "FastStream",
    "taskiq, stream",
    "huey",
    "Celery, two solo workers",
    "streaq",
    "arq",
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
    "handled per second",
    "delay, median",
    "delay, 99 %",
    "worker CPU per message",
    "memory per worker",
)
UNITS = ("", " ms", " ms", " µs", " MiB")

ENGLISH = """\
{table}

Medians of {rounds} rounds on {date}: {cores} cores ({cpu}), {server}. The limit promises nothing.
[All systems and figures](docs/explanation/benchmarks.md).
"""
CHINESE = """\
{table}

{rounds} 轮的中位数 ({date}): {cores} 核 ({cpu}), {server}. "the limit" 不作任何保证.
[全部系统与数据](explanation/benchmarks.md)
"""
INDEX = """\
- [Beside its peers](explanation/benchmarks.md): throughput, delay, memory and processor time,
  measured.
"""
CHINESE_HEADS = ("每秒处理", "延迟中位数", "延迟 99%", "每条消息的工作进程 CPU", "每个工作进程内存")


def _english(results: dict[str, Any]) -> str:
    return _filled(ENGLISH, results, ("", *HEADS))


def _chinese(results: dict[str, Any]) -> str:
    return _filled(CHINESE, results, ("", *CHINESE_HEADS))


def _index(_results: dict[str, Any]) -> str:
    return INDEX


PAGES: dict[Path, Callable[[dict[str, Any]], str]] = {
    Path("README.md"): _english,
    Path("docs/README.zh-CN.md"): _chinese,
    Path("docs/index.md"): _index,
}


def _filled(text: str, results: dict[str, Any], heads: tuple[str, ...]) -> str:
    table = "\n".join(_lines(results["systems"], heads))
    told = {"rounds": results["rounds"], "date": results["date"], **results["machine"]}
    return text.format(table=table, **told)


def _lines(systems: dict[str, Any], heads: tuple[str, ...]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"| {' | '.join(['---', *['--:'] * len(COLUMNS)])} |"
    for name in SHOWN:
        if name not in systems:
            continue
        each = systems[name]
        cells = (
            format(each["figures"][key]["median"], form) + unit
            for (key, form), unit in zip(COLUMNS, UNITS, strict=True)
        )
        version = f"redis-py {each['version']}" if name == LIMIT else each["version"]
        yield f"| {' | '.join([f'{name} ({version})', *cells])} |"


def between(text: str) -> str:
    """What a page has between the marks."""
    begin, end = text.index(BEGIN) + len(BEGIN) + 1, text.index(END)
    return text[begin:end]


def with_figures(text: str, figures: str) -> str:
    """The text of a page with these figures between its marks."""
    begin, end = text.index(BEGIN) + len(BEGIN) + 1, text.index(END)
    return f"{text[:begin]}{figures}{text[end:]}"


def wanted(path: Path, results: dict[str, Any] | None) -> str:
    """What a page of PAGES must have between its marks; None: nothing was measured yet."""
    return "\n" + PAGES[path](results) + "\n" if results else ""


def write(results: dict[str, Any], root: Path = ROOT) -> None:
    """Put the figures into all pages."""
    for path in PAGES:
        page = root / path
        page.write_text(with_figures(page.read_text(), wanted(path, results)))
