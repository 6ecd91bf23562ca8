"""The operator's commands: parse, ask `semel.operate`, print.

app         the command `semel`, put together; root: wrong arguments, in JSON too
commands/   one file per command
reports/    what the commands of the messaging half answer
render      a record as JSON and as a table; answer: stdout, stderr; keys: the keys of the JSON
preamble    what commands begin with: target (a ledger or a pipeline), database (of messages)
messages    what `dlq`, `parking` and `outbox` do with one message or many
options     options that several commands share; selection: those of a replay
exits       what exit codes mean; words: times and counts; plain: text of other people
"""

from __future__ import annotations


def main() -> None:
    """Run the command that the shell asked for."""
    from semel.cli.app import app

    app(prog_name="semel")
