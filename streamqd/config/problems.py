"""Collects every problem of a configuration, so that all are reported at once."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable

from streamqd.errors import ConfigError
from streamqd.words import harmless

Path = tuple[str | int, ...]

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SHOWN_CHARS_MAX = 60


class Problems:
    """Problems by TOML path, in the order in which they were found."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        # Where a value comes from, when not from the file: part of every sentence about it.
        self.origins: dict[Path, str] = {}
        # Where a table without a name stands, and what it is about: ends every sentence about it.
        self.places: dict[Path, str] = {}
        self._bad: set[Path] = set()

    def add(self, path: Path, clause: str) -> None:
        """Report that the setting at `path` ... `clause`."""
        self._bad.add(path)
        places = [
            self.places[path[:end]] for end in range(len(path) + 1) if path[:end] in self.places
        ]
        place = f" ({places[0]})" if places else ""
        self.sentences.append(f"{self.name(path)}: {clause}{place}")

    def bad(self, path: Path) -> None:
        """Note that what is at a path cannot be used; the sentences about it are there already."""
        self._bad.add(path)

    def ok(self, *paths: Path) -> bool:
        """Whether nothing is wrong so far with these settings, nor with the tables they are in."""
        return not any(path[:end] in self._bad for path in paths for end in range(len(path) + 1))

    def name(self, path: Path) -> str:
        """The TOML path as people write it, with the place that set it."""
        origin = next(
            (
                self.origins[path[:end]]
                for end in range(len(path), 0, -1)
                if path[:end] in self.origins
            ),
            None,
        )
        text = dotted(path)
        return f"{text} ({origin})" if origin else text

    def raise_if_any(self, salvaged: object = None) -> None:
        """Raise ConfigError with all problems, if there are any, and with what could be read."""
        if self.sentences:
            # A sentence may quote a name that anybody gave.
            error = ConfigError([harmless(each) for each in self.sentences])
            error.salvaged = salvaged
            raise error


def dotted(path: Path) -> str:
    """A path as TOML writes it: daemon.lease_ttl, consumers[0].group, topics."a.b".partitions."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _BARE.fullmatch(part) or part.startswith("@"):
            text += f".{part}" if text else part
        else:
            text += f".{json.dumps(part)}" if text else json.dumps(part)
    return text


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant."""
    found = difflib.get_close_matches(word.lower().replace("-", "_"), list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def shown(value: object, *, secret: bool = False) -> str:
    """A value as part of a sentence: short, on one line, never a secret."""
    if secret:
        return "the value"
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        return "what nests so deep"
    except ValueError:
        text = repr(value)
    return text if len(text) <= _SHOWN_CHARS_MAX else text[: _SHOWN_CHARS_MAX - 3] + "..."
