"""The reader of pages detects every false statement on a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages.reader import fences
from tests.pages.test_pages import README, ROOT, TUTORIALS, make_reader

DOCS = ROOT / "docs"
IMAGES = DOCS / "images"
BYTES_MAX = 150_000  # bytes per picture, which stays in the history forever

TRUE = r"""\
```sh
echo "it took 3s"
```

```text
it took 5s
```

```sh
printf 'over\rwritten\r\n'
```

```text
written
```

```sh
touch a.parquet
```

```text folder=.
….parquet
```

```sh other until="ready"
bash -c 'echo one; echo two; echo ready; read'
```

```text
two
```

```sh other press="Ctrl-C" code=7
bash -c 'exit 7'
```
"""
LIES = {
    "a command that does not exist": ("echo", "ehco"),
    "an output that is another": ("it took 5s", "it took long"),
    "a line that was written over": ("\nwritten\n", "\nover\n"),
    "an output that is longer": ("it took 5s", "it took 5s\nand more"),
    "a file that is not there": ("\n….parquet", "\n….csv"),
    "an exit code": ("code=7", "code=8"),
    "a line that never comes": ("\ntwo\n", "\nthree\n"),
    "an event that never comes": ('until="ready"', 'until="done"'),
    "a file without a name": ("```text", "```python"),
}


def work_through(folder: Path, text: str, patience: float) -> None:
    page = folder / "page.md"
    page.write_text(text)
    with make_reader(folder, patience) as reader:
        reader.work_through(page)


def test_correct_page_passes(state_dir: Path) -> None:
    work_through(state_dir, TRUE, 30.0)


@pytest.mark.parametrize("lie", LIES)
def test_wrong_page_fails(state_dir: Path, lie: str) -> None:
    assert LIES[lie][0] in TRUE

    with pytest.raises(AssertionError, match=r"page\.md:\d+"):
        work_through(state_dir, TRUE.replace(*LIES[lie], 1), 2.0)


def test_blocks_with_commands_have_a_language() -> None:
    commands = re.compile(r"^(streamqd|pip|make|curl|python\S*) ", re.MULTILINE)
    left_out = [
        (page.name, fence.line)
        for page in [README, *TUTORIALS.values()]
        for fence in fences(page)
        if not fence.language and commands.search(fence.text)
    ]

    assert left_out == []


def test_pictures_are_small_and_used_by_a_page() -> None:
    shown = {
        (page.parent / link).resolve()
        for page in [README, *DOCS.rglob("*.md")]
        for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text())
    }

    assert {picture.resolve() for picture in IMAGES.iterdir()} <= shown
    assert all(picture.stat().st_size < BYTES_MAX for picture in IMAGES.iterdir())
