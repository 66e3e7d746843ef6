"""Skip tests by name if they need a package of the extra `dev-all` that is missing.

`make test` installs only `dev`. With STREAMQD_TEST_ALL=1, which `make test-all` and CI set, every
package is expected to be installed, and a missing package fails the tests that need it.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

from streamqd.spark import SparkMissingError

PACKAGES = frozenset(
    {
        *(
            "asgiref",
            "basedpyright",
            "deltalake",
            "duckdb",
            "django",
            "fastapi",
            "fastavro",
            "flask",
            "google",  # of the package protobuf
            "jinja2",
            "moto",
        ),
        *(
            "opentelemetry",
            "pandas",
            "playwright",
            "polars",
            "psycopg",
            "pyarrow",
            "pydantic",
            "pymysql",
            "pyspark",
            "sentry_sdk",
        ),
        *("starlette", "sqlalchemy", "testcontainers", "uvicorn", "uvloop"),
    }
)
HINT = "`make test-all` installs it"


def all_required() -> bool:
    """Return True if every package should be installed."""
    return os.environ.get("STREAMQD_TEST_ALL") == "1"


def need(*packages: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if one of the packages is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    reason = f"{', '.join(missing)} is not installed: {HINT}"
    return pytest.mark.skipif(bool(missing) and not all_required(), reason=reason)


def skip_without(package: str) -> None:
    """Skip the running test if a package is missing. Fail it if all packages are required."""
    if importlib.util.find_spec(package) is None:
        stop = pytest.fail if all_required() else pytest.skip
        stop(f"{package} is not installed: {HINT}")


def missing(error: BaseException | None) -> str:
    """Return why a test module could not be imported, or '' unless a package is missing."""
    if all_required():
        return ""
    while error is not None:
        name = error.name if isinstance(error, ModuleNotFoundError) else ""
        if isinstance(error, SparkMissingError) or (name or "").partition(".")[0] in PACKAGES:
            return f"{error}: {HINT}"
        error = error.__cause__ or error.__context__
    return ""
