"""README.md and its Chinese version have the same sections, code, tables and measured figures."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.peers import excerpt, page
from tests.benchmarks.peers.systems import SYSTEMS
from tests.pages.reader import Fence, fences

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CHINESE = ROOT / "docs" / "README.zh-CN.md"
HANDLER_LINES_MAX = 10

NOT_SHOWN = (excerpt.LIMIT, excerpt.RAW, "huey", "another")

RESULTS: dict[str, Any] = {
    "machine": {"cpu": "a processor", "cores": 2, "python": "3.11", "server": "valkey 9"},
    "date": "2026-01-02",
    "rounds": 5,
    "systems": {
        name: {
            "version": "1.2",
            "survives": "stay pending",
            "tuning": {
                "settings": f"one thread for {name}",
                "acknowledges": "late",
                "pages": ["https://example.org/one", "https://example.org/two"],
            },
            "figures": {
                key: {"median": 1234.5 / rank, "min": 1.0 / rank, "max": 4321.0 / rank}
                for key, _, _ in page.COLUMNS
            },
        }
        for rank, name in enumerate([*excerpt.SHOWN, *NOT_SHOWN], 1)
    },
    "environments": {"celery": {"celery": "1.2"}},
}
OUTCOME: dict[str, Any] = {
    "version": "1.2",
    "survives": "lost",
    "restarts": 0,
    "jobs": 1000,
    "never_run": 0,
    "struck_again_s": 0.0421,
    "others_done_s": 0.05,
    "twice": 0,
}
SURVIVAL: dict[str, Any] = {
    "date": "2026-01-03",
    "patience_minutes": 15.0,
    "systems": {
        "streamqd": OUTCOME,
        "huey": OUTCOME | {"never_run": 17, "struck_again_s": None},
        "arq": OUTCOME | {"struck_again_s": 310.4, "others_done_s": 311.0, "twice": 2},
    },
}


def headings(path: Path) -> list[str]:
    without_code = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    return re.findall(r"^#+ (.+)$", without_code, re.MULTILINE)


def strip_comments(fence: Fence) -> object:
    """Return a block without its comments and, if it is Python, without its strings."""
    if fence.language == "python":
        tree = ast.parse(fence.text)
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        for node in texts:
            node.value = "" if isinstance(node.value, str) else node.value
        return ast.dump(tree)
    if fence.language:
        return [line.split("  #")[0].rstrip() for line in fence.text.splitlines()]
    return [line[:34].rstrip() for line in fence.text.splitlines()]


def test_readme_handler_has_ten_lines_and_intro_three_sentences() -> None:
    handler = next(fence for fence in fences(README) if fence.language == "python")
    introduction = README.read_text().split("\n\n")[1]

    assert len(handler.text.splitlines()) <= HANDLER_LINES_MAX
    assert len(re.findall(r"\.(?:\s|$)", introduction)) == 3


def test_both_readmes_have_the_same_headings() -> None:
    assert len(headings(CHINESE)) == len(headings(README))


def test_both_readmes_have_the_same_code_and_pictures() -> None:
    english, chinese = list(fences(README)), list(fences(CHINESE))
    assert [(e.language, e.words, e.options) for e in english] == [
        (c.language, c.words, c.options) for c in chinese
    ]
    for one, other in zip(english, chinese, strict=True):
        assert strip_comments(one) == strip_comments(other), f"line {other.line}"

    pictures = [re.findall(r"images/([\w.-]+)", p.read_text()) for p in (README, CHINESE)]
    assert pictures[0] == pictures[1] != []


def test_both_readmes_have_the_same_tables() -> None:
    rows = [re.findall(r"^\|.*\|$", path.read_text(), re.MULTILINE) for path in (README, CHINESE)]
    assert len(rows[0]) == len(rows[1]) > 25

    asked = [[re.findall(r"`(streamqd [^`]+)`", row) for row in each] for each in rows]
    assert asked[0] == asked[1]


@pytest.mark.parametrize("path", excerpt.PAGES, ids=str)
def test_readme_has_the_measured_figures(path: Path) -> None:
    """The README has the measured figures. If not, run `make bench NAME=page`."""
    text = (ROOT / path).read_text()

    wanted = excerpt.expected_figures(path, page.read(page.RESULTS), page.read(page.SURVIVAL))
    assert excerpt.read_figures(text) == wanted


def test_comparison_page_is_current() -> None:
    """The comparison page is up to date. If not, run `make bench NAME=page`."""
    results = page.read(page.RESULTS)
    if results is None:
        assert not page.PAGE.exists()
        pytest.skip("make bench has not been run for this version")
    assert page.PAGE.read_text() == page.text(results, page.read(page.SURVIVAL))


def test_figures_are_replaced_only_between_the_marks(tmp_path: Path) -> None:
    for path in excerpt.PAGES:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text((ROOT / path).read_text())

    excerpt.write(RESULTS, None, tmp_path)
    excerpt.write(RESULTS, None, tmp_path)  # a second run changes nothing

    for path in excerpt.PAGES:
        before, after = (ROOT / path).read_text(), (tmp_path / path).read_text()
        assert excerpt.replace_figures(before, "") == excerpt.replace_figures(after, "")
        assert excerpt.read_figures(after) == excerpt.expected_figures(path, RESULTS, None)
    table = excerpt.read_figures((tmp_path / "README.md").read_text())
    assert "| streamqd (1.2) | 1,234 | 1,234.5 ms | 1,234.5 ms | 1,234 µs | 1,234 MiB |" in table
    assert "another" not in table
    assert "| another (1.2) |" in page.text(RESULTS)


def test_figures_show_the_range_next_to_each_median() -> None:
    text = page.text(RESULTS)

    row = "| streamqd (1.2) | 1,234 (1 to 4,321) | 1,234 (1 to 4,321) | 1,234 (1 to 4,321) |"
    assert row in text  # the row about memory
    for _, title, _ in page.COLUMNS:
        assert f"| {title} |" in text


def test_result_without_a_range_shows_the_median_alone() -> None:
    figures = {key: {"median": 1234.5} for key, _, _ in page.COLUMNS}
    old = RESULTS | {"systems": {"huey": RESULTS["systems"]["huey"] | {"figures": figures}}}

    assert "| huey (1.2) | 1,234 | 1,234 | 1,234 |" in page.text(old)


def test_system_on_another_server_has_no_share_of_the_limit() -> None:
    huey = RESULTS["systems"]["huey"] | {"server": "redis 8"}
    systems = RESULTS["systems"] | {"huey": huey}

    assert "| huey (1.2) | - | " in page.text(RESULTS | {"systems": systems})
    assert "| another (1.2) | 66.7% | " in page.text(RESULTS)


def test_failed_round_is_named_next_to_its_system() -> None:
    systems = {"huey": RESULTS["systems"]["huey"] | {"rounds": 3}}

    assert "| huey (1.2), 3 of 5 rounds | " in page.text(RESULTS | {"systems": systems})


def test_versions_include_package_client_and_server() -> None:
    """Each system is listed with its package, client and server.

    Older results list the client only under the system's environment, or not at all.
    """
    celery = {"celery": "1.2", "redis": "5.0", "hiredis": "3.0", "kombu": "7"}
    huey = RESULTS["systems"]["huey"]
    new = {"package": "huey", "clients": {"redis": "6.0"}, "server": "redis 8"}
    systems = RESULTS["systems"] | {"huey": huey | new}

    text = page.text(RESULTS | {"systems": systems, "environments": {"celery": celery}})
    assert "| huey | huey 1.2 | redis 6.0 | redis 8 |" in text
    assert "| Celery, prefork | 1.2 | redis 5.0, hiredis 3.0 | valkey 9 |" in text
    assert "| another | 1.2 | not recorded | valkey 9 |" in text


def test_systems_without_figures_are_named_on_the_page() -> None:
    assert "Not measured in this run: *streamqd, batch handler*; " in page.text(RESULTS)

    every = {each.name: RESULTS["systems"]["huey"] for each in SYSTEMS}
    assert "Not measured in this run" not in page.text(RESULTS | {"systems": every})


def test_comparison_page_names_each_tuning_and_its_sources() -> None:
    links = "[1](https://example.org/one), [2](https://example.org/two)"

    assert f"| huey | one thread for huey | late | {links} |" in page.text(RESULTS)


def test_page_accepts_results_without_recorded_settings() -> None:
    """The page accepts a result without a limit, as written by `--only celery`."""
    about = {key: value for key, value in RESULTS["systems"]["huey"].items() if key != "tuning"}
    old = RESULTS | {"systems": {"huey": about}}

    text = page.text(old)
    assert "Settings of each system" not in text
    assert page.RAW_TEXT not in text
    assert "| huey (1.2) | - | 1" in text
    assert "| huey | stay pending |" in text


def test_measured_outcomes_of_jobs_replace_documented_ones() -> None:
    text = page.text(RESULTS, SURVIVAL)

    assert "This table quotes the documentation" not in text
    assert "stops after 15\nminutes" in text
    assert "| streamqd (1.2) | after 0.04 s | 0 | 0.05 s | 0 | lost |" in text
    assert "| huey (1.2) | not within 15 min | 17 | 0.05 s | 0 | lost |" in text
    assert "| arq (1.2) | after 5.2 min | 0 | 5.2 min | 2 | lost |" in text


def test_readme_has_a_column_for_killed_workers() -> None:
    table = excerpt.expected_figures(Path("README.md"), RESULTS, SURVIVAL)

    assert f"| {excerpt.HEADS[-1]} | {excerpt.KILLED_HEAD} |" in table
    assert re.search(r"^\| streamqd \(1\.2\) \|.* \| after 0\.04 s \|$", table, re.MULTILINE)
    assert re.search(r"^\| Dramatiq, tuned \(1\.2\) \|.* MiB \|  \|$", table, re.MULTILINE)
