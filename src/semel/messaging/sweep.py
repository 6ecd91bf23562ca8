"""One run of retention through a table, which looks at every row once."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Sweep:
    """How far a run has come: what it has looked at and kept, its next batch leaves alone.

    Otherwise every batch would read all that is kept again, to come to what may go.
    """

    reached: dict[str, float] = field(default_factory=dict)
    """By whatever a store looks through: the place of the row that was deleted last."""

    def since(self, part: str = "") -> float:
        """Return where the next batch begins, the place itself included."""
        return self.reached.get(part, 0)

    def note(self, places: list[int] | list[float], part: str = "") -> int:
        """Note the places of rows that were deleted; return how many they are."""
        if places:
            self.reached[part] = max(places)
        return len(places)
