"""The operator's commands: parse, ask `semel.operate`, print.

app         every command in its group; wrong arguments are answered in JSON, too
commands/   one file per command
render      a record as JSON and as a table; times, counts and lists for people
answer      stdout, stderr and exit codes
preamble    how a command is made, and what it begins with: target (a ledger or a pipeline),
            database (of messages)
messages    what `dlq`, `parking` and `outbox` do with one message or many
options     options that several commands share; selection: those of a replay
logs        log lines of a service, with their fields
plain       text of other people, without escape sequences
"""

from __future__ import annotations


def main() -> None:
    """Run the command that the shell asked for."""
    from semel.cli.app import app

    app(prog_name="semel")
