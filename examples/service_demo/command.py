"""The demo's command line, and its order of events: run, fix, replay, audit, tell."""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg
from rich import box
from rich.console import Console
from rich.table import Table

from examples.demo.repair import run_semel
from examples.demo.run import DemoFailed
from examples.demo.screen import LineScreen, open_console
from examples.service_demo.run import Run, Variant
from examples.service_demo.traffic import MISSPELLED, NO_RATE, Plan
from semel.testing import audit_sinks, services

# No primary key, in either variant: nothing but the claim keeps duplicates out.
TABLE: Final = "CREATE TABLE entries (id text, account text, cents bigint)"
PROCESSED: Final = "CREATE TABLE processed (id text PRIMARY KEY)"

HEADINGS: Final = {
    Variant.SEMEL: "With semel: @semel.subscriber",
    Variant.PLAIN: "The same records, kills and outage: session per message, FastStream's own acks",
}


@dataclass(frozen=True, slots=True)
class Audit:
    """One variant's rows, compared with what was sent."""

    variant: Variant
    effects: int
    duplicates: int
    missing: int
    foreign: int
    dead_letters: int
    waiting: int

    @property
    def is_clean(self) -> bool:
        """Whether each payment has its effect once, and only the unreadable record is dead."""
        wrong = self.duplicates + self.missing + self.foreign + self.waiting
        return wrong == 0 and (self.variant is Variant.PLAIN or self.dead_letters == 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.service_demo",
        description="Send payments through Kafka to a FastStream service while the service is "
        "killed with SIGKILL and PostgreSQL crashes, then compare what was sent with the rows. "
        "Exits with 1 if semel's rows are not exactly right.",
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="how long payments are sent")
    parser.add_argument("--kills", type=int, default=3, help="how often the service is killed")
    parser.add_argument("--seed", type=int, default=1, help="chooses payments and moments")
    parser.add_argument("--no-contrast", action="store_true", help="only the service with semel")
    parser.add_argument("--plain-output", action="store_true", help="lines without colours")
    given = parser.parse_args(argv)
    if given.seconds <= 0 or given.kills < 0:
        parser.error("--seconds must be more than 0, --kills not negative")
    console = open_console(given.plain_output)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        services.java()
        variants = [Variant.SEMEL] if given.no_contrast else list(Variant)
        return demo(Plan(given.seed, given.seconds, given.kills), variants, console)
    except services.ServiceUnavailable as missing:
        console.print(f"The demo cannot start: {missing}", style="bold red")
        return 2
    except KeyboardInterrupt:
        console.print("Stopped; nothing is left behind.")
        return 130


def demo(plan: Plan, variants: Sequence[Variant], console: Console) -> int:
    """Run every variant and audit it; return the exit code, which is semel's alone."""
    began = time.monotonic()
    if download := services.first_download():
        console.print(download[0].upper() + download[1:])
    records, distinct = len(plan.records()), len(plan.payments())
    console.print(
        f"{records:,} records with {distinct:,} payments, {plan.kills} kills, an outage of "
        f"PostgreSQL, {len(NO_RATE) + 1} payments that fail, 1 record that is not JSON"
    )
    with tempfile.TemporaryDirectory(prefix="semel-demo-") as name:
        folder = Path(name)
        # Enter, but not list: PostgreSQL runs as another user where this one is root.
        folder.chmod(0o711)
        with (
            services.PostgresServer(directory=folder / "postgres") as postgres,
            services.KafkaServer(directory=folder / "kafka") as kafka,
        ):
            try:
                audits = [
                    _run(variant, plan, (kafka, postgres), folder, console) for variant in variants
                ]
            except (DemoFailed, psycopg.Error) as failure:
                console.print(f"The demo failed: {failure}", style="bold red", soft_wrap=True)
                for log in folder.glob("*.log"):
                    console.print(log.read_text()[-3_000:], markup=False, soft_wrap=True)
                return 1
    console.print(table_of(audits, records, distinct, plan.kills))
    for audit in audits:
        console.print(verdict(audit), soft_wrap=True)
    console.print(f"\n{time.monotonic() - began:.0f} s in all.", style="dim")
    return 0 if audits[0].is_clean else 1


def _run(
    variant: Variant,
    plan: Plan,
    servers: tuple[services.KafkaServer, services.PostgresServer],
    folder: Path,
    console: Console,
) -> Audit:
    with LineScreen(console, HEADINGS[variant]) as screen:
        run = Run(variant, plan, servers, folder, screen)
        with psycopg.connect(run.url) as connection:
            connection.execute(TABLE)
            connection.execute(PROCESSED)
        try:
            run.run()
            if variant is Variant.SEMEL:
                mend(run, plan, folder, console)
        finally:
            run.stop()
        return audited(run, variant, plan)


def mend(run: Run, plan: Plan, folder: Path, console: Console) -> None:
    """Deal with what is parked, as an operator does: fix one payment, and deploy a release."""

    def semel(*arguments: str) -> None:
        environment = {**run.environment, "RELEASE": "2"}
        run_semel(console, run.url, *arguments, environment=environment)

    wrong = next(payment for payment in plan.payments() if payment.id == MISSPELLED)
    fixed = folder / "fixed.json"
    fixed.write_text(json.dumps({**wrong._asdict(), "currency": "EUR"}))
    mine = ("--consumer", "billing")
    why = ("--actor", "ann", "--yes", "--reason")
    semel("dlq", "list", *mine)
    semel("parking", "keys", *mine)
    semel("parking", "fix", MISSPELLED, *mine, "--payload", str(fixed), "--keep-id", *why, "a typo")
    semel("parking", "release", MISSPELLED, *mine, *why, "the currency is fixed")
    run.stop()
    console.print()
    run.start(release="2")
    run.note("deployed", "release 2, which has a rate for CHF")
    handler = ("--handler", "examples.service_demo.service:billing")
    semel("replay", "run", *handler, "--parked", "--error-code", "NO_RATE", *why, "release 2")
    run.wait_until(lambda: _waiting(run) == 0)


def _waiting(run: Run) -> int:
    return run.ask("SELECT count(*) FROM semel.waiting_message")[0][0]


def audited(run: Run, variant: Variant, plan: Plan) -> Audit:
    """Compare the rows with the payments."""
    rows = run.ask("SELECT id, account, cents FROM entries")
    (found,) = audit_sinks([payment.entry for payment in plan.payments()], {"e": rows}).sinks
    letters = waiting = 0
    if variant is Variant.SEMEL:
        letters, waiting = run.ask("SELECT count(*) FROM semel.dead_letter")[0][0], _waiting(run)
    wrong = len(found.duplicated), len(found.missing), len(found.foreign)
    return Audit(variant, len(rows), *wrong, letters, waiting)


def table_of(audits: Sequence[Audit], records: int, distinct: int, kills: int) -> Table:
    """Show the audits."""
    title = f"The audit, after {kills} kills -9 and an outage"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_style="bold", pad_edge=False)
    table.add_column("")
    for name in ("messages", "distinct", "effects", "duplicates", "missing", "dead letters"):
        table.add_column(name, justify="right")
    table.add_column("")
    for audit in audits:
        name = "with semel" if audit.variant is Variant.SEMEL else "plain FastStream"
        numbers = (audit.effects, audit.duplicates, audit.missing, audit.dead_letters)
        shown = [f"{number:,}" for number in (records, distinct, *numbers)]
        mark = "[green]✓ once" if audit.is_clean else "[bold red]✗ wrong"
        table.add_row(name, *shown, mark)
    return table


def verdict(audit: Audit) -> str:
    """Say what an audit means."""
    if audit.variant is Variant.SEMEL and audit.is_clean:
        return (
            "With semel each payment has its effect once; the record that is not JSON is a dead "
            "letter, with its bytes."
        )
    if audit.variant is Variant.SEMEL:
        return (
            f"With semel the rows differ from the payments ({audit.foreign} foreign, "
            f"{audit.waiting} still waiting): that must never happen. Please report it."
        )
    if audit.is_clean:
        return "The plain service was lucky this time. Nothing makes that certain."
    return (
        f"The plain service has {audit.missing:,} payments too few and {audit.duplicates:,} too "
        "many: FastStream's default commits the position on a timer, even if the function raised "
        "meanwhile. Its table of processed messages prevents duplicates, not losses."
    )
