"""`python -m streamqd` is the `streamqd` command."""

from __future__ import annotations

from streamqd.cli import main

if __name__ == "__main__":
    main()
