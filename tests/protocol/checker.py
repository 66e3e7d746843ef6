"""One run of Spin: generate, compile and run the checker, and read the counterexample."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.protocol.trace import STEPS
from tests.protocol.variants import Variant

NAMES = ("partition", "rounds", "schedule", "outbox")
MODELS = {name: Path(__file__).parent / f"{name}.pml" for name in NAMES}
SECONDS_MAX = 900


class Checked(NamedTuple):
    """The result of a run. `violated` is the number of the invariant, '' if all hold."""

    variant: Variant
    states: int
    transitions: int
    violated: str
    trace: list[str]  # sentences, the counterexample

    @property
    def expected(self) -> bool:
        """True if the protocol holds or, for a mutation, the mutation was found."""
        return self.violated in self.variant.breaks.split(" or ")


def check(variant: Variant, *, shortest: bool = False) -> Checked:
    """Explore states until an invariant breaks or all are visited.

    With `shortest`, a mutation's counterexample is the shortest one, which takes several times as
    long. Raises RuntimeError if a tool fails or the search is incomplete.
    """
    model = MODELS[variant.model]
    with tempfile.TemporaryDirectory(prefix="sq-model-") as folder:
        _run(["spin", *variant.flags, "-a", str(model)], folder)
        # Breadth first finds the shortest counterexample, depth first finds one in fewer states.
        search = ["-DBFS"] if variant.breaks and shortest else []
        # Optimization costs gcc more time than it saves in most searches.
        _run(["gcc", "-w", "-DSAFETY", *search, "-DVECTORSZ=2048", "-o", "pan", "pan.c"], folder)
        # A state in which all processes wait is not an error in itself: invariant 7 covers it.
        printed = _run(["./pan", "-m200000", "-E", "-n"], folder)
        if "max search depth too small" in printed or "errors:" not in printed:
            raise RuntimeError(f"{variant.title}: the search did not end:\n{printed}")
        states, transitions = _count("states, stored", printed), _count("transitions", printed)
        if "errors: 0" in printed:
            return Checked(variant, states, transitions, "", [])
        replayed = _run(
            ["spin", *variant.flags, "-t", "-k", f"{model.name}.trail", "-p", str(model)], folder
        )
    return Checked(
        variant, states, transitions, _invariant(replayed), STEPS[variant.model](replayed)
    )


def _invariant(replayed: str) -> str:
    """Return the number of the invariant that the last step of the replay breaks."""
    broken = re.findall(r"^\s*broken (\d)$", replayed, re.MULTILINE)
    if not broken:
        raise RuntimeError(f"the replay ends without a broken invariant:\n{replayed[-2000:]}")
    return str(broken[-1])


def _count(what: str, printed: str) -> int:
    found = re.search(rf"([0-9.e+]+) {what}", printed)
    return int(float(found.group(1))) if found else 0


def _run(command: list[str], folder: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=SECONDS_MAX,
    )
    # Some versions of the checker exit with 1 after they have found an error.
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{command[0]} failed ({done.returncode}):\n{done.stdout}")
    return done.stdout
