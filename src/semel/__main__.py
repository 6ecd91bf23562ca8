"""``python -m semel``: the command `semel`, if it is not on the path."""

from __future__ import annotations

from semel.cli import main

if __name__ == "__main__":
    main()
