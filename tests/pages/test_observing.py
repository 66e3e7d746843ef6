"""The pages about OpenTelemetry and Sentry name only variables and attributes that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from streamqd import telemetry
from streamqd.logs import EVENTS

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "docs" / "how-to" / name for name in ("trace-messages.md", "report-errors-to-sentry.md")
]
FOLDER = Path(telemetry.__file__).parent
SOURCES = "".join(path.read_text() for path in sorted(FOLDER.glob("*.py")))


def test_documented_attributes_are_set_by_the_code() -> None:
    text = "".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"`(streamqd\.[a-z_.]+)[`= ]", text))
    assert named
    assert {name for name in named if f'"{name}"' not in SOURCES} == set()


@pytest.mark.parametrize(
    ("page", "sources"),
    [
        ("trace-messages.md", ["runs.py", "sending.py", "sending_otel.py"]),
        ("report-errors-to-sentry.md", ["sentry.py"]),
    ],
)
def test_every_attribute_is_on_its_page(page: str, sources: list[str]) -> None:
    text = (PAGES[0].parent / page).read_text()
    code = "".join((FOLDER / name).read_text() for name in sources)
    attributes = set(re.findall(r'"(streamqd\.[a-z_.]+)"', code))
    assert attributes
    assert {name for name in attributes if f"`{name}" not in text} == set()


def test_telemetry_events_are_documented() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert {name for name in EVENTS if name.startswith("telemetry.") and name not in text} == set()
