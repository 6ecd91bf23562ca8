"""The command line in a process of its own: act_program ARGUMENT …"""

from __future__ import annotations

from collections.abc import Sequence

from semel.cli.app import app


def main(arguments: Sequence[str]) -> int:
    """Do what the arguments say."""
    try:
        app(list(arguments), prog_name="semel")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
