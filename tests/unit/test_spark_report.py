"""A report without Spark has findings and changes, and its page cannot be injected into."""

from __future__ import annotations

import datetime as dt
import json
import re
import shlex
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from streamqd.admin.fleet import GroupStatus, LaggingGroup, StatusView
from streamqd.admin.reading import Unreadable
from streamqd.admin.schedules import ScheduleTotals
from streamqd.cli import cli
from streamqd.errors import RequestRefusedError
from streamqd.spark.location import location
from streamqd.spark.pipelines import report as reports
from streamqd.spark.pipelines.chart import bars, count_step, time_labels
from streamqd.spark.pipelines.report_findings import FORMAT, assess_status, compare_reports
from streamqd.spark.pipelines.report_page import page, period, run_time

NOW = 1_763_600_000_000
EVIL = "\"'><script>alert(1)</script><img src=http://example.com/x>\x1b[31m\u202e{{ 7*7 }}&amp;"
VOID = {"meta", "br", "wbr"}
OPEN = {"td", "th", "tr"}  # tags that HTML allows to be left open

GROUP = GroupStatus(
    topic="orders", group="billing", partitions=4, owned=4, condition="ready",
    condition_partitions=4, longest_run_seconds=None, reason="", rate=2.0, lag=0, pending=0,
    waiting_retries=0, dead_letters=0, oldest_unix_ms=None,
)  # fmt: skip
LATE = LaggingGroup("orders", "billing", 90, NOW - 600_000, 3.0, [0])
NO_SCHEDULES = ScheduleTotals(0, 0, 0, 0, 0, 0, None)
FLEET = StatusView("main", NOW, [], {}, [], [], [], [], [], {}, NO_SCHEDULES, [])


def live_fleet(
    *groups: GroupStatus, lagging: list[LaggingGroup] | None = None, **more: Any
) -> StatusView:
    """Return a fleet that has one live instance."""

    class Alive:
        instance, state = "west-1", "working"

    alive: Any = Alive()
    return replace(FLEET, instances=[alive], groups=[*groups], lagging=lagging or [], **more)


def topic(name: str = "orders", *held: int, **more: Any) -> dict[str, Any]:
    """Return a topic whose partitions have these numbers of entries."""
    partitions = [
        {"partition": at, "entries": each, "bytes": each, "first_unix_ms": NOW, "last_unix_ms": NOW}
        for at, each in enumerate(held)
    ]
    return {
        "topic": name, "live": True, "partition_count": len(held), "entries": sum(held),
        "bytes": sum(held), "dead_letters": 0, "partitions": partitions, "keys": [], "causes": [],
        "width_ms": 1000, "timeline": [{"at_unix_ms": NOW, "entries": 1, "dead_letters": 1}],
        "fields": None, "quarantine": None, "history": None,
    } | more  # fmt: skip


def cause(letters: int, **more: Any) -> dict[str, Any]:
    told = dict.fromkeys(("place", "error_class", "error_message", "reason", "handler"), "")
    return {
        "group": "billing", "fingerprint": "f", "dead_letters": letters, "first_unix_ms": NOW,
        "last_unix_ms": NOW, "p50_ms": 1, "p99_ms": None, "id": "0:1-0",
    } | told | more  # fmt: skip


def finding_lines(seen: StatusView, *topics: dict[str, Any]) -> list[str]:
    """Return the findings, one per line."""
    found = assess_status(seen, topics)["findings"]
    return [f"{each['severity']}: {each['about']}: {each['text']}" for each in found]


# --- findings -------------------------------------------------------------------------------------


def test_healthy_fleet_with_a_small_topic_gets_no_advice() -> None:
    """A healthy topic of five entries gets no advice on its partitions."""
    hot = [{"key": "k", "crc32": 1, "entries": 5, "keys": 1}]
    assert finding_lines(live_fleet(GROUP), topic("orders", 5, 0, 0, 0, keys=hot)) == []


def test_report_lists_the_worst_finding_first() -> None:
    dying = topic("orders", 10, dead_letters=7, causes=[cause(4, error_class="KeyError"), cause(3)])
    stuck = replace(GROUP, group="mail", longest_run_seconds=75.0, pending=1)
    failing = replace(GROUP, waiting_retries=12, lag=90, pending=10)
    unread = topic("audit", 40)
    seen = live_fleet(failing, stuck, lagging=[LATE], unreadable=[Unreadable("k", "f", "x", "y")])

    found = assess_status(seen, [unread, topic("fine", 1), dying])

    assert finding_lines(seen, unread, dying) == [
        "problem: orders/billing: 90 messages unread, the oldest for 10 min 0 s, growing by 3.0/s",
        "problem: orders/mail: has been running one message for 75 s",
        "warning: orders/billing: 12 messages wait for their next attempt",
        "warning: orders: 7 dead letters, 57% of them KeyError in group billing",
        "warning: fleet main: 1 value in Redis cannot be read",
        "note: audit: no group reads it",
    ]
    assert [each["topic"] for each in found["topics"]] == ["orders", "audit", "fine"]


def test_report_ranks_topics_by_their_worst_finding() -> None:
    seen = live_fleet(GROUP, replace(GROUP, topic="mail", waiting_retries=1), lagging=[LATE])
    uneven = topic("orders", 900, 100)
    assert [each.partition(":")[0] for each in finding_lines(seen, topic("mail", 9), uneven)] == [
        *("problem", "warning", "note"),
    ]
    found = assess_status(seen, [topic("mail", 9), uneven])["topics"]
    assert [each["topic"] for each in found] == ["orders", "mail"]


@pytest.mark.parametrize(
    ("seconds", "severity"), [(29, []), (30, ["warning"]), (299, ["warning"]), (300, ["problem"])]
)
def test_lag_is_graded_by_the_oldest_message(seconds: int, severity: list[str]) -> None:
    late = replace(LATE, since_unix_ms=NOW - seconds * 1000, lag_per_second=None)
    found = assess_status(live_fleet(GROUP, lagging=[late]), [topic("orders", 1)])["findings"]
    assert [each["severity"] for each in found] == severity


def test_condition_finding_names_place_and_reason() -> None:
    broken = replace(GROUP, condition="circuit-open", condition_partitions=2, reason="OSError")
    assert finding_lines(live_fleet(broken), topic()) == [
        "problem: orders/billing: circuit open in 2 of 4 partitions: OSError"
    ]
    stopped = replace(GROUP, condition="stopped", lag=3)
    assert finding_lines(live_fleet(stopped), topic()) == ["warning: orders/billing: stopped"]


def test_finding_names_the_fleet_if_no_instance_is_live() -> None:
    free = replace(GROUP, condition="free", lag=5)
    assert finding_lines(replace(FLEET, groups=[free]), topic()) == [
        "problem: fleet main: no instance is alive"
    ]
    assert finding_lines(live_fleet(free), topic()) == ["problem: orders/billing: no owner"]


def test_skew_finding_names_the_key_or_partition_count() -> None:
    one = [{"key": "k", "crc32": 0, "entries": 900, "keys": 3}]
    full = topic("orders", 1000, 100, 100, 100, keys=one)
    assert finding_lines(live_fleet(GROUP), full) == [
        (
            "note: orders: partition 0 of 4 has 77% of the entries, and one key has 69%; use finer"
            " keys, such as user-7/orders"
        )
    ]
    # Eight keys share one of two partitions, and four partitions would separate them.
    many = [{"key": "k", "crc32": each % 2 * 2, "entries": 100, "keys": 8} for each in range(8)]
    uneven = assess_status(live_fleet(GROUP), [topic("orders", 900, 200, keys=many)])["findings"]
    assert [(each["text"], each["command"]) for each in uneven] == [
        (
            (
                "partition 0 of 2 has 82% of the entries."
                " With 4 partitions, the fullest would have 43%"
            ),
            "streamqd topic grow orders 4",
        )
    ]


def test_report_names_only_existing_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMQ_REDIS__URL", "redis://127.0.0.1:1/0")
    broken = replace(GROUP, condition="circuit-open", lag=5, waiting_retries=2)
    fields = {"fits": 0, "bad": 1, "rows": []}
    dying = topic("orders", 900, 200, dead_letters=1, causes=[cause(1)], fields=fields)
    bad = [Unreadable("k", "f", "x", "y")]
    for seen in (live_fleet(broken, lagging=[LATE], unreadable=bad), FLEET):
        for each in assess_status(seen, [dying, topic("audit", 3)])["findings"]:
            program, *words = shlex.split(each["command"])
            done = CliRunner().invoke(cli, words)
            assert (program, done.exit_code) == ("streamqd", 4), done.output


# --- changes --------------------------------------------------------------------------------------


def document(seen: StatusView, *topics: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a report that is compared with nothing."""
    made = {
        "format": FORMAT, "version": "1", "made_unix_ms": NOW, "since_unix_ms": None,
        "until_unix_ms": NOW, "seconds": 1.0,
        "asked": {"topics": [], "archive": EVIL, "since": False, "until": True},
        **assess_status(seen, topics),
    }  # fmt: skip
    return made | compare_reports(None, made)


def test_worst_changes_are_listed_first() -> None:
    before = document(live_fleet(GROUP), topic("orders", 5), topic("gone", 3))
    grown = replace(GROUP, lag=70, waiting_retries=0)
    dying = topic("orders", 5, dead_letters=4, causes=[cause(4, error_class="KeyError")])
    now = document(live_fleet(grown), dying)

    assert compare_reports(before, now) == {
        "compared_with": NOW,
        "changes": [
            {"measure": "orders/billing: unread", "before": 0, "now": 70},
            {"measure": "orders/billing: dead letters with KeyError", "before": 0, "now": 4},
            {"measure": "partitions of gone", "before": 1, "now": 0},
            {"measure": "entries of gone", "before": 3, "now": 0},
        ],
    }


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"format": "streamqd-report/1"}, "another version"),
        ({"asked": {"topics": ["one"]}}, "covers other topics"),
        ({"measures": [1]}, "cannot be read"),
        ({"made_unix_ms": True}, "cannot be read"),
        ({"made_unix_ms": 1 << 60}, "cannot be read"),
    ],
)
def test_unusable_last_report_is_named(wrong: dict[str, Any], sentence: str) -> None:
    now = document(live_fleet(GROUP), topic("orders", 5))
    found = compare_reports(now | wrong, now)
    assert found["changes"] == []
    assert sentence in found["compared_with"]
    assert sentence in Reader(page(now | found)).words


def test_last_report_is_compared_only_by_numbers() -> None:
    now = document(live_fleet(GROUP), topic("orders", 5))
    told = {"entries of orders": "5", "a": True, "b": 1 << 60, "c": 1.5, "d" * 501: 1, EVIL: 3}
    found = compare_reports(now | {"measures": told}, now)
    assert [each["measure"] for each in found["changes"]] == [
        *(EVIL, "entries of orders", "partitions of orders")
    ]


# --- the page -------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """Collects the parts of a page. Fails if a tag is left open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID | OPEN:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in OPEN:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def hostile_report() -> dict[str, Any]:
    """Return a report whose texts are all foreign input."""
    texts = ("fingerprint", "id", "place", "error_class", "error_message", "reason", "handler")
    row = dict.fromkeys(("name", "type", "least", "greatest"), EVIL)
    row |= {"count": 3, "nulls": 0, "distinct": 1, "top": [{"item": EVIL, "count": 3}]}
    held = topic(
        EVIL, 8, 2000,
        keys=[{"key": EVIL, "crc32": 3, "entries": 1900, "keys": 1}],
        dead_letters=2, causes=[cause(2, group=EVIL, **dict.fromkeys(texts, EVIL))],
        timeline=[{"at_unix_ms": NOW + at, "entries": 1, "dead_letters": at} for at in (0, 5000)],
        fields={"fits": 1, "bad": 1, "rows": [row]},
    )  # fmt: skip
    group = replace(GROUP, topic=EVIL, group=EVIL, condition=EVIL, reason=EVIL, waiting_retries=2)
    seen = live_fleet(group, lagging=[replace(LATE, topic=EVIL, group=EVIL)], fleet=EVIL)
    made = document(seen, held)
    return made | compare_reports(made | {"measures": {EVIL: 3}}, made)


def test_report_page_escapes_values_and_loads_nothing() -> None:
    text = page(hostile_report())
    read = Reader(text)
    assert not {"script", "img", "link", "iframe", "object", "base"} & {*read.tags}
    names = {name for name, _ in read.attributes}
    assert not {name for name in names if name.startswith("on")} | ({"src", "srcset"} & names)
    links = {value for name, value in read.attributes if name in ("href", "action")}
    assert all(each.startswith("#") for each in links)
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert read.words.count("alert(1)") > 20
    assert "{{ 7*7 }}" in read.words
    assert not {"\x1b", "\u202e"} & {*text}


def test_report_page_has_plots_and_figures() -> None:
    text = page(hostile_report())
    read = Reader(text)
    assert read.tags.count("svg") == 2
    assert read.tags.count("rect") >= 4
    assert not {"desc", "defs"} & {*read.tags}
    for words in ("2,008", "streamqd retry list", "1,900", "Since 2025-11-20 00:53:20"):
        assert words in read.words


def past_history(**more: Any) -> dict[str, Any]:
    """Return a topic's history of two hours."""
    group = {
        "group": EVIL, "handler": EVIL, "handled": 123_456, "failed": 7, "retried": 6,
        "dead_lettered": 1, "most_lag": 5_000, "p50_seconds": 0.034, "p95_seconds": 1.07,
        "p99_seconds": None,
    }  # fmt: skip
    rows = [
        {
            "at_unix_ms": NOW + hour * 3_600_000,
            "handled": 61_728,
            "failed": hour,
            "p99_seconds": 0.5,
        }
        for hour in range(2)
    ]
    return {"width_ms": 3_600_000, "groups": [group], "timeline": rows} | more


def test_report_page_shows_the_history() -> None:
    held = topic("orders", history=past_history())
    text = page(document(live_fleet(GROUP), held))
    read = Reader(text)
    assert not {"script", "img"} & {*read.tags}
    assert read.tags.count("svg") == 3
    for words in (
        *("Messages handled per hour (UTC)", "Failed runs per hour (UTC)"),
        *("run times per hour, in milliseconds", "123,456", "5,000", "34 ms", "1.1 s"),
    ):
        assert words in read.words


def test_report_page_leaves_out_plots_without_failures_or_runs() -> None:
    quiet = past_history(
        timeline=[{**each, "failed": 0, "p99_seconds": None} for each in past_history()["timeline"]]
    )
    read = Reader(page(document(live_fleet(GROUP), topic("orders", history=quiet))))
    assert read.tags.count("svg") == 1
    assert "Failed runs" not in read.words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        *((None, None), (0.0000041, "4.1 µs"), (0.000131, "131 µs"), (0.0999, "100 ms")),
        *((0.034359738, "34 ms"), (0.9, "900 ms"), (1.07, "1.1 s")),
        *((34.4, "34 s"), (137.4, "137 s"), (4398.0, "4,398 s")),
    ],
)
def test_run_time_is_shown_with_its_unit(seconds: float | None, words: str | None) -> None:
    assert run_time(seconds) == words


def test_report_shows_the_reasons_of_the_quarantine() -> None:
    reasons = [
        {"reason": EVIL, "rows": 3_000, "last_unix_ms": NOW},
        {"reason": "it has no payload", "rows": 1_000, "last_unix_ms": NOW},
    ]
    held = {"archive": "/data", "view": "quarantine_orders", "rows": 4_000, "reasons": reasons}
    fields = {"fits": 1, "bad": 2, "rows": []}
    made = document(live_fleet(GROUP), topic("orders", 3, fields=fields, quarantine=held))
    read = Reader(page(made))
    assert not {"script", "img"} & {*read.tags}
    for words in ("4,000 archived payloads do not fit", "75.0%", "it has no payload", "1,000"):
        assert words in read.words
    [found] = [each for each in made["findings"] if "quarantine" in each["text"]]
    assert "the quarantine holds 4,000 rows, 75% of them: " in found["text"]


def test_report_truncates_long_texts() -> None:
    made = document(live_fleet(GROUP), topic("x" * 100_000, 1))
    assert len(page(made)) < 40_000


def test_report_omits_times_out_of_range() -> None:
    far = (1 << 63) - 1
    beyond = [{"at_unix_ms": at, "entries": 1, "dead_letters": 0} for at in (0, far // 2)]
    made = document(live_fleet(GROUP), topic("orders", 2, timeline=beyond, width_ms=far // 60))
    made["causes"] = [{"topic": "orders", **cause(1, last_unix_ms=far)}]
    assert Reader(page(made)).tags.count("svg") == 0


# --- charts ---------------------------------------------------------------------------------------

WIDTHS = (1, 5, 15, 60, 300, 900, 3_600, 10_800, 43_200, 86_400, 604_800, 2_419_200)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("buckets", [2, 3, 17, 60])
def test_time_labels_are_unique_and_do_not_overlap(width: int, buckets: int) -> None:
    """Buckets of less than a minute have labels with seconds, and labels never overlap."""
    first = NOW - NOW % (1000 * width)
    last = first + 1000 * width * buckets
    found = [*time_labels(first, last, 5.0)]
    assert 1 <= len(found) <= 6
    assert re.match(r"[0-9]{4}(-|$)", found[0][2] or found[0][1]), "the date, with its year"
    below = ""
    seen = set()
    for at, label, under in found:
        assert first <= at < last
        below = under or below
        seen.add((below, label))
    assert len(seen) == len(found)


@pytest.mark.parametrize(
    ("days", "labels"),
    [
        (150, ["Dec", "Jan", "Feb", "Mar", "Apr"]),
        (400, ["Jan", "Apr", "Jul", "Oct"]),
        (1_000, ["2026", "2027", "2028"]),
        (36_500, ["2050", "2100"]),
    ],
)
def test_labels_of_long_ranges_are_months_and_years(days: int, labels: list[str]) -> None:
    found = [*time_labels(NOW, NOW + days * 86_400_000, 5.0)]
    assert [label for _, label, _ in found] == labels
    for at, _, _ in found:
        moment = dt.datetime.fromtimestamp(at / 1000, dt.UTC)
        assert (moment.day, moment.hour, moment.minute) == (1, 0, 0)


@pytest.mark.parametrize(
    ("milliseconds", "words"),
    [(1_000, "second"), (15_000, "15 seconds"), (60_000, "minute"), (900_000, "15 minutes"),
     (10_800_000, "3 hours"), (86_400_000, "day"), (2_419_200_000, "28 days"), (1, "1 ms")],
)  # fmt: skip
def test_width_of_a_bar_is_described_in_words(milliseconds: int, words: str) -> None:
    assert period(milliseconds) == words


@pytest.mark.parametrize(
    ("most", "step"), [(0, 1), (1, 1), (4, 1), (5, 2), (50, 20), (99, 50), (1_234_567, 500_000)]
)
def test_count_axis_has_round_integer_steps(most: int, step: int) -> None:
    """All steps of an axis are equal, and no label has a fraction such as .40000."""
    assert count_step(most) == step


def test_chart_has_separators_years_and_a_tooltip() -> None:
    drawn = bars({NOW: 1_234_567, NOW + 5_000: 0}, 5_000, "entries")
    assert ">1,500,000</text>" in drawn
    assert ">2025-11-20</text>" in drawn
    assert "<title>2025-11-20 00:53:20: 1,234,567</title>" in drawn


def test_empty_window_is_reported() -> None:
    """If the window is empty, the page says so in a sentence instead of listing findings."""
    made = document(live_fleet(), topic("orders", 0)) | {
        "since_unix_ms": NOW,
        "until_unix_ms": None,
    }
    words = " ".join(Reader(page(made)).words.split())
    wanted = "There are no entries and no dead letters from 2025-11-20 00:53:20 to now (UTC)."
    assert wanted in words


def test_payload_finding_names_the_quarantine() -> None:
    """The command of the finding counts the quarantine's rows by reason."""
    fields = {"fits": 1, "bad": 2, "rows": []}
    held = {"archive": "/data/my archive", "view": "quarantine_orders", "rows": 3}
    made = document(live_fleet(GROUP), topic("orders", 3, fields=fields, quarantine=held))
    [found] = [each for each in made["findings"] if "schema" in each["text"]]
    assert found["text"] == "2 payloads do not fit the schema, and the quarantine holds 3 rows"
    assert found["command"] == (
        "streamqd pipeline sql --archive '/data/my archive'"
        ' "SELECT reason, count(*) FROM quarantine_orders GROUP BY reason"'
    )


def test_report_page_without_topics_has_a_note() -> None:
    words = Reader(page(document(live_fleet()))).words
    assert "There are no topics" in words
    assert "this is the first report" in words


# --- the folder -----------------------------------------------------------------------------------


def test_report_round_trips_through_its_file(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    assert reports._read_last_report(location(out)) is None
    reports._write(location(out), hostile_report())
    assert {each.name for each in out.iterdir()} == {"report.json", "report.html"}
    assert reports._read_last_report(location(out)) == json.loads(json.dumps(hostile_report()))


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": "another"}', "[" * 100_000, '{"format": 7}', "\xff"]
)
def test_folder_without_a_report_is_never_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / "report.json").write_text(text, "latin-1")
    with pytest.raises(RequestRefusedError, match="was not written by a report"):
        reports._read_last_report(location(tmp_path))


def test_report_refuses_an_unsuitable_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link"):
        with pytest.raises(RequestRefusedError, match="not a directory"):
            reports._read_last_report(location(tmp_path / name))
    with pytest.raises(RequestRefusedError, match="cannot be written"):
        reports._write(location(tmp_path / "file" / "below"), document(live_fleet()))


def test_failed_report_leaves_no_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "report.html").mkdir(parents=True)
    with pytest.raises(RequestRefusedError, match="cannot be written"):
        reports._write(location(out), document(live_fleet()))
    assert [each.name for each in out.iterdir()] == ["report.html"]
