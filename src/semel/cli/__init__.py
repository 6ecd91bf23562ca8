"""The operator's commands: `semel status`, `doctor`, `recover` and the rest."""

from __future__ import annotations


def main() -> None:
    """Run the command that the shell asked for."""
    from semel.cli.app import app

    app(prog_name="semel")
