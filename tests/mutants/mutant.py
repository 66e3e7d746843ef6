"""A mutant: a mistake in one file, and the tests that must detect it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class DoesNotApply(Exception):  # noqa: N818 - named after what is reported
    """The text to change does not occur, or not the expected number of times."""


class Change(NamedTuple):
    """Text that must occur exactly `times` times, and its replacement."""

    old: str
    new: str
    times: int = 1


class Mutant(NamedTuple):
    """One mistake in one file. Each of its tests must fail."""

    name: str
    breaks: str  # the promise of the code that this mistake breaks
    path: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...]  # pytest node ids; without [..], any case may be the one that fails

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
        """A test that must still pass, '' for none: a script that does not compile fails all."""
        if not self.path.startswith("lua/"):
            return ""
        test = "test_script_compiles_to_the_hash_of_its_source"
        name = Path(self.path).stem
        case = "" if name.startswith("_") else f"[{name}]"
        return f"tests/contract/test_every_script.py::{test}{case}"


def mutant(
    name: str, breaks: str, path: str, *changes: tuple[str, str], tests: dict[str, list[str] | str]
) -> Mutant:
    """Return a mutant. `tests` maps files in tests/ to the names of their tests."""
    nodes = tuple(
        f"tests/{file}::{test}"
        for file, named in tests.items()
        for test in ([named] if isinstance(named, str) else named)
    )
    return Mutant(name, breaks, path, tuple(Change(*change) for change in changes), nodes)
