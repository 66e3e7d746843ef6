"""Collect the problems of a configuration, so that they can be reported together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from streamqd.errors import ConfigError
from streamqd.words import escape_unprintable

Path = tuple[str | int, ...]

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SHOWN_CHARS_MAX = 60


class Problems:
    """The problems of one configuration, in the order in which they were found."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        # Maps the path of each value that is not from the file to its source. Sentences about the
        # value mention the source.
        self.origins: dict[Path, str] = {}
        # Path of a table in a list -> its name and its place in the file. They are appended to
        # sentences about the table, because a path such as consumers[3] is hard to find.
        self.places: dict[Path, str] = {}
        self._bad: set[Path] = set()

    def add(self, path: Path, clause: str) -> None:
        """Add a problem. `clause` completes a sentence that starts with the path of the setting."""
        self._bad.add(path)
        places = [
            self.places[path[:end]] for end in range(len(path) + 1) if path[:end] in self.places
        ]
        place = f" ({places[0]})" if places else ""
        self.sentences.append(f"{self.name(path)}: {clause}{place}")

    def bad(self, path: Path) -> None:
        """Mark a path as unusable without adding a sentence."""
        self._bad.add(path)

    def ok(self, *paths: Path) -> bool:
        """Return True if these settings, and their tables, have no problems so far."""
        if not self._bad:
            return True
        return not any(path[:end] in self._bad for path in paths for end in range(len(path) + 1))

    def name(self, path: Path) -> str:
        """Return a dotted TOML path, followed by the source of the value if it is not the file."""
        origin = next(
            (
                self.origins[path[:end]]
                for end in range(len(path), 0, -1)
                if path[:end] in self.origins
            ),
            None,
        )
        text = format_path(path)
        return f"{text} ({origin})" if origin else text

    def raise_if_any(self, salvaged: object = None) -> None:
        """Raise ConfigError if there are problems.

        `salvaged` contains the settings that could be read, and defaults for all others.
        """
        if self.sentences:
            # Escape the sentences, because they may quote untrusted names.
            error = ConfigError([escape_unprintable(each) for each in self.sentences])
            error.salvaged = salvaged
            raise error


def format_path(path: Path) -> str:
    """Return a path in dotted form, such as consumers[0].group or topics."a.b".partitions."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _BARE.fullmatch(part) or part.startswith("@"):
            text += f".{part}" if text else part
        else:
            text += f".{json.dumps(part)}" if text else json.dumps(part)
    return text


def nearest_word(word: str, known: Iterable[str]) -> str | None:
    """Return the most similar known word, or None if no word is similar enough."""
    import difflib  # imported here to save memory in a daemon that has no problems

    found = difflib.get_close_matches(word.lower().replace("-", "_"), list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def quote(value: object, *, secret: bool = False) -> str:
    """Return a value on one line for use in a sentence, cut to 60 characters.

    A secret value is replaced by `the value`.
    """
    if secret:
        return "the value"
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        return "a deeply nested value"
    except ValueError:
        text = repr(value)
    return text if len(text) <= _SHOWN_CHARS_MAX else text[: _SHOWN_CHARS_MAX - 3] + "..."
