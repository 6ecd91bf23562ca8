"""What the demo shows while it runs: lines that stay, and below them where it is now."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from examples.demo.payments import Producer
from examples.demo.place import Variant
from examples.demo.progress import SINK_NAMES, STEPS, Progress

STYLES: Final = {
    "kill -9": "bold red",
    "failed": "yellow",
    "outage": "yellow",
    "mended": "green",
    "recovered": "bold green",
    "replayed": "green",
    "restarted": "yellow",
    "done": "bold",
}

# Without a terminal, a line about the progress now and then is enough.
LINE_SECONDS: Final = 4.0

# Wide enough for the audit's table if the width of the output is unknown.
COLUMNS: Final = 100


def open_console(plain: bool) -> Console:
    """Make the console; *plain* leaves out colours and everything that moves."""
    console = Console(highlight=False)
    if plain or not console.is_terminal:
        return Console(highlight=False, force_terminal=False, no_color=True, width=COLUMNS)
    return console


def open_screen(console: Console, title: str) -> AbstractContextManager[LineScreen]:
    """Choose the display that fits the console."""
    return LiveScreen(console, title) if console.is_terminal else LineScreen(console, title)


class LineScreen:
    """Plain lines, for pipes and logs."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._next = LINE_SECONDS

    def __enter__(self) -> Self:
        self._console.print(Text(f"\n{self._title}", style="bold"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def note(self, seconds: float, heading: str, text: str) -> None:
        """Add a line that stays."""
        self._next = seconds + LINE_SECONDS
        style = STYLES.get(heading, "dim")
        line = Text(f"{seconds:6.1f} s  ", style="dim")
        line.append(f"{heading:<10}", style=style)
        line.append(text, style="" if heading in STYLES else "dim")
        self._console.print(line, soft_wrap=True)

    def show(self, seconds: float, progress: Progress, producer: Producer, visible: int) -> None:
        """Print a line now and then."""
        if seconds < self._next or not progress.is_ready:
            return
        if progress.variant is Variant.SEMEL and progress.last_steps:
            self.note(seconds, f"cycle {progress.last_done}", _milliseconds(progress))
        self.note(seconds, "", f"{producer.sent:,} sent, {visible:,} visible in Postgres")


class LiveScreen(LineScreen):
    """Lines that stay, and a panel that moves, for terminals."""

    def __enter__(self) -> Self:
        super().__enter__()
        self._live = Live(console=self._console, refresh_per_second=12, transient=True)
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def show(self, seconds: float, progress: Progress, producer: Producer, visible: int) -> None:
        """Draw the panel."""
        bars = Table.grid(padding=(0, 2))
        bars.add_column(width=20)
        bars.add_column(width=40)
        bars.add_column(justify="right")
        for name, number in (("sent", producer.sent), ("visible in Postgres", visible)):
            bar = ProgressBar(total=producer.total, completed=min(number, producer.total))
            bars.add_row(name, bar, f"{number:,} of {producer.total:,}")
        head = f"{seconds:.0f} s · driver {progress.driver}"
        if progress.epoch:
            head += f" · epoch {progress.epoch}"
        if progress.last_batch is not None:
            head += f" · {progress.noun} {progress.last_batch}"
        took = Text()
        if progress.variant is Variant.SEMEL and progress.last_steps:
            took = Text(f"cycle {progress.last_done}: {_milliseconds(progress)}", style="dim")
        body = Group(_steps(progress), took, bars)
        self._live.update(Panel(body, title=head, title_align="right", border_style="dim"))


def _steps(progress: Progress) -> RenderableType:
    """Draw the steps of the batch under way: done, being done, to come."""
    if not progress.is_ready:
        return Text("Spark starts …", style="yellow")
    line = Text()
    for name in STEPS[progress.variant]:
        if line:
            line.append(" ─ ", style="dim")
        shown = SINK_NAMES.get(name, name)
        if progress.batch is None:
            line.append(f"○ {shown}", style="dim")
        elif name == progress.step:
            line.append(f"● {shown}", style="bold yellow")
        elif name in progress.steps:
            line.append(f"✓ {shown}", style="green")
        else:
            line.append(f"○ {shown}", style="dim")
    return line


def _milliseconds(progress: Progress) -> str:
    """Say how long the steps of the last finished cycle took."""
    took = (f"{name} {seconds * 1000:.0f}" for name, seconds in progress.last_steps.items())
    return f"{', '.join(took)} ms"
