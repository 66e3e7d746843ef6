"""What a mutant is: a mistake in one file, and the tests that must notice it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class DoesNotApply(Exception):  # noqa: N818 - named after what is reported
    """The text to be changed is not there, or not as often as it should be."""


class Change(NamedTuple):
    """Text that must occur exactly `times` times, and what takes its place."""

    old: str
    new: str
    times: int = 1


class Mutant(NamedTuple):
    """One mistake in one file. Each of its tests must turn red."""

    name: str
    breaks: str  # what the code promises and this mistake takes away
    path: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...]  # pytest node ids; without [..] any of its cases may be the red one

    def applied(self, root: Path) -> str:
        """Return the text of the file with the mistake in it. Raises DoesNotApply."""
        try:
            text = (root / self.path).read_text()
        except FileNotFoundError:
            raise DoesNotApply(f"{self.path} is gone") from None
        for change in self.changes:
            found = text.count(change.old)
            if found != change.times:
                first = change.old.strip().splitlines()[0]
                raise DoesNotApply(f"{self.path}: {found} times `{first}`, not {change.times}")
            text = text.replace(change.old, change.new)
        return text

    @property
    def guard(self) -> str:
        """The test that must stay green, '' for none: a script that does not compile fails all."""
        if not self.path.startswith("lua/"):
            return ""
        test = "test_script_compiles_and_its_name_is_the_hash_of_its_source"
        name = Path(self.path).stem
        case = "" if name.startswith("_") else f"[{name}]"
        return f"tests/contract/test_every_script.py::{test}{case}"


def mutant(
    name: str, breaks: str, path: str, *changes: tuple[str, str], tests: dict[str, list[str] | str]
) -> Mutant:
    """Write a mutant down. `tests` maps files below tests/ to the names of their tests."""
    nodes = tuple(
        f"tests/{file}::{test}"
        for file, named in tests.items()
        for test in ([named] if isinstance(named, str) else named)
    )
    return Mutant(name, breaks, path, tuple(Change(*change) for change in changes), nodes)
