"""A reader who does what a page says: types its commands, writes its files, compares what it sees.

The words behind the language of a fence are for this reader; Markdown shows the language alone.

    ```sh                       the commands are typed in the terminal `first`, one after the other
    ```sh second                in another terminal, which begins in the folder of the first
    ```sh until="ready"         the last one goes on; it is waited for until it has said this
    ```sh press="Ctrl-C"        a key is pressed before; what runs in the terminal must then end
    ```sh answer="y"            what is typed when the last one asks
    ```sh code=8                the exit code of the last one; code=01: 0 or 1; others end with 0
    ```sh needs="promtool"      left out where there is no such program; so may be what it prints
    ```sh setup                 not typed: it makes the environment that the tests run in
    ```python file=weblog.py    the file is written; without, its first line may say `# weblog.py`
    ```python spark             left to the tests of Spark, which have a session
    ```text                     what the last commands have printed, all of it
    ```text first               lines that a running command prints, in any order
    ```text folder=/data        files that are in this folder now
    ```                         a picture

In what is printed `…` stands for anything in its line, and for any lines when alone in one. Ids,
times, the width of columns and empty lines are not compared. The id of a dead letter that a page
has shown stands, in later commands, for the one that was printed there: a reader takes it from the
screen.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.pages.shell import Terminal, alike, matches, seen

FIRST = "first"
ID = re.compile(r"\d+:\d{13}-\d+")  # of a dead letter
KEYS = {"Ctrl-C": "\x03", "Ctrl-D": "\x04"}
FENCE = re.compile(r"^```(\S*)[ ]*([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^# ([\w./-]+\.\w+)$")


@dataclass(frozen=True)
class Fence:
    """One block of code of a page. `line` is where it begins."""

    language: str
    words: list[str]
    options: Mapping[str, str]
    text: str
    line: int

    @property
    def file(self) -> str:
        """The name of the file that this is, or ''."""
        named = FILE.match(self.text.partition("\n")[0])
        return self.options.get("file") or (named[1] if named else "")


def fences(page: Path) -> Iterator[Fence]:
    """The blocks of code of a page, in order."""
    text = page.read_text()
    for found in FENCE.finditer(text):
        language, info, body = found.groups()
        words = shlex.split(info)
        options = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        yield Fence(language, plain, options, body, text.count("\n", 0, found.start()) + 1)


class Reader:
    """Works through a page in a folder of its own, which is also the home of its terminals."""

    def __init__(
        self,
        home: Path,
        env: Mapping[str, str],
        replaced: Mapping[str, str],
        patience: float = 30.0,  # seconds for each thing that is waited for
    ) -> None:
        self._home, self._replaced, self._patience = home, dict(replaced), patience
        self.env = {**env, "HOME": str(home)}  # of terminals that are opened from now on
        self._terminals: dict[str, Terminal] = {}
        self._last = FIRST
        self.done = 0  # blocks that were worked through

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        for each in self._terminals.values():
            each.close()

    def work_through(self, page: Path) -> None:
        """Do what the page says; fail where something else comes of it."""
        for fence in fences(page):
            try:
                self.obey(fence)
            except AssertionError as error:
                raise AssertionError(f"{page.name}:{fence.line}: {error}") from None

    def obey(self, fence: Fence) -> None:
        """Do what one block says."""
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
            _find(here / self.mine(fence.options["folder"]), seen(text))
        elif fence.language == "text":
            self._compare(self.terminal(name), seen(text))
        else:
            assert fence.file, "it does not say which file it is"
            (self.terminal(FIRST).folder / fence.file).write_text(text)
        self.done += 1

    def mine(self, text: str) -> str:
        """A text of a page with what stands on this machine for the page's places."""
        for old, new in self._replaced.items():
            text = text.replace(old, new)
        return text

    def terminal(self, name: str) -> Terminal:
        """The terminal of this name, which is opened where the first one is."""
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
        printed = seen(terminal.new)
        assert matches(expected, printed), _difference(expected, printed)
        shown, real = (ID.findall("\n".join(lines)) for lines in (expected, printed))
        self._replaced |= dict(zip(shown, real, strict=False))


def _find(folder: Path, expected: list[str]) -> None:
    there = [str(each.relative_to(folder)) for each in folder.rglob("*")]
    for line in expected:
        assert any(alike(line, each) for each in there), f"{folder} has no {line}, but {there}"


def _difference(expected: list[str], printed: list[str]) -> str:
    return "\n".join(["the page shows", *expected, "and it prints", *printed])
