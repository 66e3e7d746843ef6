"""A reader that follows a page: types its commands, writes its files, and compares the output.

The words after the language of a fence are for this reader. Markdown shows only the language.

    ```sh                       the commands are typed in the terminal `first`, one after the other
    ```sh second                in another terminal, which starts in the folder of the first
    ```sh until="ready"         the last one keeps running; wait until it has printed this
    ```sh press="Ctrl-C"        press a key first; the running command must then exit
    ```sh answer="y"            the answer to the question of the last one
    ```sh code=8                the exit code of the last one (01: 0 or 1); others exit with 0
    ```sh needs="promtool"      skipped without this program, and so is its output
    ```sh setup                 not typed: it creates the environment of the tests
    ```python file=weblog.py    a file to write; the first line `# weblog.py` may name it too
    ```python append=settings.py  lines for the end of a file that exists
    ```python excerpt=shop.py   lines that a file contains
    ```python spark             run by the Spark tests, which have a session
    ```text                     the whole output of the last commands
    ```text first               lines that a running command prints, in any order
    ```text folder=/data        files that are now in this folder
    ```                         a picture

In output, `…` matches any text in its line, and on a line of its own any lines. IDs, times, column
widths and empty lines are not compared. If a page has shown the ID of a dead letter, later commands
use the ID that was printed there, as a reader copies it from the screen.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.pages.shell import Terminal, matches, matches_line, non_empty_lines

FIRST = "first"
ID = re.compile(r"\d+:\d{13}-\d+")  # ID of a dead letter
KEYS = {"Ctrl-C": "\x03", "Ctrl-D": "\x04"}
FENCE = re.compile(r"^```(\S*)[ ]*([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^# ([\w./-]+\.\w+)$")


@dataclass(frozen=True)
class Fence:
    """One code block of a page. `line` is the number of its first line."""

    language: str
    words: list[str]
    options: Mapping[str, str]
    text: str
    line: int

    @property
    def file(self) -> str:
        """The name of the file that the block contains, or '' if it contains none."""
        named = FILE.match(self.text.partition("\n")[0])
        return self.options.get("file") or (named[1] if named else "")


def fences(page: Path) -> Iterator[Fence]:
    """Return the code blocks of a page, in order."""
    text = page.read_text()
    for found in FENCE.finditer(text):
        language, info, body = found.groups()
        words = shlex.split(info)
        options = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        yield Fence(language, plain, options, body, text.count("\n", 0, found.start()) + 1)


class Reader:
    """Works through a page in its own directory, which is also the home of its terminals."""

    def __init__(
        self,
        home: Path,
        env: Mapping[str, str],
        replaced: Mapping[str, str],
        patience: float = 30.0,  # seconds that each wait may take
    ) -> None:
        self._home, self._replaced, self._patience = home, dict(replaced), patience
        self.env = {**env, "HOME": str(home)}  # for terminals that are opened from now on
        self._terminals: dict[str, Terminal] = {}
        self._last = FIRST
        self.done = 0  # number of blocks executed so far

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        for each in self._terminals.values():
            each.close()

    def work_through(self, page: Path) -> None:
        """Follow the page. Fails if a result differs from what the page shows."""
        for fence in fences(page):
            try:
                self.obey(fence)
            except AssertionError as error:
                raise AssertionError(f"{page.name}:{fence.line}: {error}") from None

    def obey(self, fence: Fence) -> None:
        """Execute one block."""
        text = self.mine(fence.text)
        needed = fence.options.get("needs", "bash")
        if not fence.language or {"setup", "spark"} & {*fence.words} or not shutil.which(needed):
            return
        name = fence.words[0] if fence.words else self._last
        if fence.language == "sh":
            self._last = fence.words[0] if fence.words else FIRST
            self._type(self.terminal(self._last), fence, text)
        elif "folder" in fence.options:
            here = self.terminal(FIRST).folder
            _find(here / self.mine(fence.options["folder"]), non_empty_lines(text))
        elif fence.language == "text":
            self._compare(self.terminal(name), non_empty_lines(text))
        elif "append" in fence.options:
            file = self.terminal(FIRST).folder / fence.options["append"]
            file.write_text(f"{file.read_text()}\n{text}")
        elif "excerpt" in fence.options:
            assert text in (self.terminal(FIRST).folder / fence.options["excerpt"]).read_text()
        else:
            assert fence.file, "it does not say which file it is"
            (self.terminal(FIRST).folder / fence.file).write_text(text)
        self.done += 1

    def mine(self, text: str) -> str:
        """Return text from a page, with the paths and addresses of this machine."""
        for old, new in self._replaced.items():
            text = text.replace(old, new)
        return text

    def terminal(self, name: str) -> Terminal:
        """Return the terminal with this name. A new one opens in the directory of the first."""
        if name not in self._terminals:
            folder = self._terminals[FIRST].folder if self._terminals else self._home
            self._terminals[name] = Terminal(folder, self.env, self._patience)
        return self._terminals[name]

    def _type(self, terminal: Terminal, fence: Fence, text: str) -> None:
        terminal.forget()
        if "press" in fence.options:
            terminal.type(KEYS[fence.options["press"]])
            terminal.ended()
            terminal.forget()
        assert not terminal.runs, f"something runs in this terminal:\n{terminal.new}"
        *first, last = re.sub(r"(\\|(?<=\|))\n", "", text).splitlines()
        for command in first:
            assert terminal.run(command) == 0, f"{command}\n{terminal.new}"
        until, codes = fence.options.get("until"), fence.options.get("code", "0")
        if until:
            terminal.type(last + "\n")
            terminal.wait(lambda: until in terminal.new, f"{last}: {until}")
        else:
            found = terminal.run(last, fence.options.get("answer", ""))
            assert str(found) in codes, f"{last} ends with {found}, not {codes}\n{terminal.new}"

    def _compare(self, terminal: Terminal, expected: list[str]) -> None:
        if terminal.runs:
            terminal.take(expected)
            return
        printed = non_empty_lines(terminal.new)
        assert matches(expected, printed), _difference(expected, printed)
        shown, real = (ID.findall("\n".join(lines)) for lines in (expected, printed))
        self._replaced |= dict(zip(shown, real, strict=False))


def _find(folder: Path, expected: list[str]) -> None:
    there = [str(each.relative_to(folder)) for each in folder.rglob("*")]
    for line in expected:
        assert any(matches_line(line, each) for each in there), (
            f"{folder} has no {line}, but {there}"
        )


def _difference(expected: list[str], printed: list[str]) -> str:
    return "\n".join(["the page shows", *expected, "and it prints", *printed])
