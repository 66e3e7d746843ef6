"""Parse option strings and collect all problems with them. This module does no I/O."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from streamqd.config.values import parse_size
from streamqd.model import TopicPartition
from streamqd.spark.offsets import COUNTS, LAG, Bound, Position

# Spark adds these options itself, so they are ignored.
_SPARK = frozenset({"checkpointlocation", "queryname"})


class OptionsError(ValueError):
    """The options of a read or a write are invalid. The message lists all problems."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("streamq: " + "; ".join(problems))
        self.problems = problems

    def __reduce__(self) -> tuple[Any, ...]:
        # Spark pickles errors to pass them between processes, so an instance must be rebuilt from
        # these.
        return OptionsError, (self.problems,)


class OptionParser:
    """Parses the options of one read or write, and collects their problems.

    An option whose name is not in `known` is reported as a problem. `elsewhere` maps the names (in
    lower case) of options that other connectors have to advice on the alternative, which becomes
    part of the report.
    """

    def __init__(
        self, raw: Mapping[str, str], known: tuple[str, ...], elsewhere: Mapping[str, str]
    ) -> None:
        self.problems: list[str] = []
        self._raw = {name.lower(): value for name, value in raw.items()}
        lower = {name.lower(): name for name in known}
        for name in sorted(self._raw.keys() - lower.keys() - _SPARK):
            if name in elsewhere:
                self.problems.append(f"{name} is not an option: {elsewhere[name]}")
            else:
                close = difflib.get_close_matches(name, lower, 1)
                hint = f"; did you mean {lower[close[0]]}?" if close else ""
                self.problems.append(f"{name} is not an option{hint}")

    def default(self, values: Mapping[str, str]) -> None:
        """Set values for options that the user did not set."""
        self._raw = {name.lower(): value for name, value in values.items()} | self._raw

    def finish(self) -> None:
        if self.problems:
            raise OptionsError(self.problems)

    def text(self, name: str) -> str:
        return str(self._raw.get(name.lower(), ""))

    def read(self, name: str, parse: Callable[[str], Any], default: Any) -> Any:
        text = self.text(name).strip()
        if not text:
            return default
        try:
            return parse(text)
        except ValueError as error:
            self.problems.append(f"{name} {error}")
            return default

    def flag(self, name: str, default: bool) -> bool:
        words = {"true": True, "false": False}
        text = self.text(name).strip().lower()
        if text and text not in words:
            self.problems.append(f"{name} must be true or false, not {text!r}")
        return words.get(text, default)

    def names(self, name: str, default: tuple[str, ...]) -> tuple[str, ...]:
        """Parse a list of names such as `key, value`."""
        listed = [each.strip() for each in self.text(name).split(",")]
        return tuple(dict.fromkeys(filter(None, listed))) or default

    def integer(self, name: str, default: int, *, low: int, high: int = (1 << 63) - 1) -> int:
        text = self.text(name).strip()
        if not text:
            return default
        if not re.fullmatch(r"[0-9]{1,19}", text) or not low <= int(text) <= high:
            top = f" to {high}" if high < 1 << 62 else " or more"
            self.problems.append(f"{name} must be an integer, {low}{top}, not {text!r}")
            return default
        return int(text)

    def size(self, name: str, default: int) -> int:
        text = self.text(name).strip()
        found = self.read(name, lambda raw: int(raw) if raw.isdigit() else parse_size(raw), default)
        if not 1 <= found <= 1 << 30:
            self.problems.append(f"{name} must be 1 byte to 1 GiB, not {text}")
            return default
        return int(found)

    def document(self, name: str, text: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except ValueError as error:
            self.problems.append(f"{name} is not valid JSON: {error}")
            return {}
        if not isinstance(found, dict):
            self.problems.append(f"{name} must be a JSON object")
            return {}
        return found

    def partitions(self, name: str, text: str) -> list[TopicPartition]:
        """Parse partitions such as `{"access": [0, 2]}`."""
        places: list[TopicPartition] = []
        for topic, numbers in self.document(name, text).items():
            fits = isinstance(numbers, list) and all(
                isinstance(number, int) and number >= 0 for number in numbers
            )
            if fits:
                places += [(topic, number) for number in numbers]
            else:
                self.problems.append(f'{name}: write partitions as {{"{topic}": [0, 1]}}')
        return places

    def places(
        self,
        name: str,
        text: str,
        assign: tuple[TopicPartition, ...],
        parse: Callable[[Any], Bound],
    ) -> dict[TopicPartition, Bound]:
        """Parse bounds for single partitions, such as `{"access": {"0": …}}`.

        `text` may also be an offset from a checkpoint. It contains the number of entries before
        each position, and these numbers are stored in the returned bounds.
        """
        bounds: dict[TopicPartition, Bound] = {}
        document = self.document(name, text)
        counts = document.pop(COUNTS, {})
        document.pop(LAG, None)
        for topic, partitions in document.items():
            if not isinstance(partitions, dict) or not all(key.isdigit() for key in partitions):
                self.problems.append(f'{name}: write it as {{"{topic}": {{"0": …}}}}')
                continue
            for number, value in partitions.items():
                try:
                    bound = parse(value)
                    passed = counts.get(topic, {}).get(number) if counts else None
                    if bound.kind == "id" and isinstance(passed, int):
                        bound = Bound("position", Position(bound.value, passed))
                    bounds[topic, int(number)] = bound
                except (ValueError, AttributeError) as error:
                    self.problems.append(f"{name}: {topic} {number}: {error}")
        missing = [f"{topic} {number}" for topic, number in assign if (topic, number) not in bounds]
        if missing:
            self.problems.append(f"{name} has no position for {', '.join(missing)}; add it")
        return bounds
