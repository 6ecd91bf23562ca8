"""The demo's command line, and its order of events: run, audit, tell, clear away."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final

import psycopg
from rich.console import Console

from examples.demo.audit import Counts, count
from examples.demo.keep import keep, look
from examples.demo.payments import DUPLICATE_SHARE, MISSPELLED_PAYMENTS
from examples.demo.pipeline import TABLE, create_iceberg_table
from examples.demo.place import Place, Variant
from examples.demo.repair import repair
from examples.demo.run import DemoFailed, Plan, Run, RunReport
from examples.demo.screen import open_console, open_screen
from examples.demo.words import audit_table, number_of, verdict_with_semel, verdict_without
from semel import SqlDatabase, errors
from semel.testing import services

PER_SECOND: Final = 1_500
PARTITIONS: Final = 2

HEADINGS: Final = {
    Variant.SEMEL: "With semel: Postgres, Iceberg, S3 and Parquet under one decision",
    Variant.PLAIN: "The same payments and kills with a plain foreachBatch to Postgres and Parquet",
}

INTERRUPTED: Final = 128 + signal.SIGINT


def arguments() -> argparse.ArgumentParser:
    """Say what can be asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Send payments from Kafka through Spark into Postgres, Iceberg, S3 and Parquet "
        "files while the Spark driver is killed with SIGKILL at random moments, then compare the "
        "source with every sink row by row. Exits with 1 if a row is missing, doubled or foreign.",
    )
    parser.add_argument(
        "--seconds", type=_positive, default=30.0, help="how long payments arrive (default: 30)"
    )
    parser.add_argument(
        "--kills",
        type=_count,
        default=3,
        metavar="N",
        help="how often the driver is killed (default: 3)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="chooses the payments and the moments of the kills (default: 1)",
    )
    parser.add_argument(
        "--files",
        action="store_true",
        help="read payments from files, as it happens where no Kafka broker can be started",
    )
    parser.add_argument(
        "--no-contrast", action="store_true", help="leave out the run with a plain foreachBatch"
    )
    parser.add_argument(
        "--plain-output", action="store_true", help="print lines without colours and movement"
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the folder, and say how to look around in it"
    )
    parser.add_argument(
        "--look", type=Path, metavar="FOLDER", help="start the servers of a kept folder again"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit code."""
    given = arguments().parse_args(argv)
    console = open_console(given.plain_output)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        if given.look:
            return look(given.look, console)
        services.java()
        plan = Plan(given.seed, given.seconds, given.kills, PER_SECOND)
        variants = [Variant.SEMEL] if given.no_contrast else list(Variant)
        return demo(plan, variants, console, keep_folder=given.keep, from_files=given.files)
    except services.ServiceUnavailable as missing:
        console.print(f"The demo cannot start: {missing}", style="bold red")
        return 2
    except KeyboardInterrupt:
        console.print("Stopped; nothing is left behind.")
        return INTERRUPTED


def demo(
    plan: Plan,
    variants: Sequence[Variant],
    console: Console,
    *,
    keep_folder: bool,
    from_files: bool,
) -> int:
    """Run every variant, audit all of them, and clear away; return the exit code."""
    began = time.monotonic()
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="semel-demo-"))
        removal = _Removal(folder)
        stack.callback(removal.remove)
        # Enter, but not list: PostgreSQL runs as another user where this one is root.
        folder.chmod(0o711)
        broker = None if from_files else start_broker(stack, folder, console)
        console.print(
            f"{plan.total:,} payments in {plan.seconds:g} s from {'Kafka' if broker else 'files'}, "
            f"{number_of(plan.kills, 'kill', 'kills')} of the Spark driver, seed {plan.seed}"
        )
        if broker:
            console.print(
                f"{DUPLICATE_SHARE:.0%} of the records are sent twice, one is not JSON, "
                f"{MISSPELLED_PAYMENTS} payments are misspelled, some overtake the one before of "
                f"their account, and a provider is down for a while"
            )
        server = stack.enter_context(services.PostgresServer(directory=folder / "postgres"))
        store = stack.enter_context(services.SeaweedServer(directory=folder / "store"))
        os.environ.update(store.environment)  # where boto3 looks for keys, here and in drivers
        # A second Ctrl-C must not leave half of it: this is the first thing done at the end.
        stack.callback(signal.signal, signal.SIGINT, signal.SIG_IGN)
        temporary = None if keep_folder else folder
        try:
            reports = [
                _run(variant, folder, (server, store, broker), plan, console, temporary)
                for variant in variants
            ]
            audited = [count(report.variant, report.place) for report in reports]
        except (DemoFailed, errors.SemelError, psycopg.Error, OSError) as failure:
            removal.called_off = True
            console.print(f"The demo failed: {failure}", style="bold red", soft_wrap=True)
            console.print(f"Kept for a look: {folder}", soft_wrap=True)
            return 1
        code = tell(audited, reports, plan, console)
        console.print(f"\n{time.monotonic() - began:.0f} s in all.", style="dim")
        if keep_folder or code:
            removal.called_off = True
            keep(folder, server, store, reports[0].place, console)
    return code


def start_broker(stack: ExitStack, folder: Path, console: Console) -> services.KafkaServer | None:
    """Start Kafka until the end of the stack; None where that is not possible."""
    if download := services.first_download():
        console.print(download[0].upper() + download[1:], soft_wrap=True)
    try:
        return stack.enter_context(services.KafkaServer(directory=folder / "kafka"))
    except services.ServiceUnavailable as missing:
        console.print(f"Payments come from files, without Kafka: {missing}", soft_wrap=True)
        return None


def tell(
    audited: Sequence[Counts], reports: Sequence[RunReport], plan: Plan, console: Console
) -> int:
    """Print the audit and what it means; return the exit code, which is semel's alone."""
    console.print()
    console.print(audit_table(audited, plan.kills))
    code = 0
    for counts, report in zip(audited, reports, strict=True):
        if counts.variant is Variant.SEMEL:
            style = "green" if counts.is_clean else "bold red"
            console.print(verdict_with_semel(counts, report), style=style)
            code = 0 if counts.is_clean else 1
        else:
            console.print(f"\n{verdict_without(counts, report, plan)}")
    return code


def _run(
    variant: Variant,
    folder: Path,
    servers: tuple[services.PostgresServer, services.SeaweedServer, services.KafkaServer | None],
    plan: Plan,
    console: Console,
    temporary: Path | None,
) -> RunReport:
    server, store, broker = servers
    url = server.create_database(variant)
    bootstrap = broker.bootstrap if broker else ""
    place = Place(folder / variant, url, bootstrap, store.endpoint, store.catalog_uri)
    place.make()
    create_iceberg_table(place)
    if broker:
        broker.create_topic(place.topic, PARTITIONS)
    with psycopg.connect(place.url) as connection:
        connection.execute(TABLE)
    mends = None
    if broker and variant is Variant.SEMEL:
        asyncio.run(_create_tables(url))
        mends = partial(repair, console=console)
    with open_screen(console, HEADINGS[variant]) as screen:
        return Run(variant, place, plan, screen, temporary, mends).run()


async def _create_tables(url: str) -> None:
    database = SqlDatabase(url)
    await database.create_tables()
    await database.close()


class _Removal:
    """The removal of the folder at the end, in every case."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.called_off = False

    def remove(self) -> None:
        """Remove it, unless that was called off."""
        if not self.called_off:
            shutil.rmtree(self._folder, ignore_errors=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _positive(text: str) -> float:
    seconds = float(text)
    if seconds <= 0:
        raise argparse.ArgumentTypeError("must be more than 0")
    return seconds


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return number
