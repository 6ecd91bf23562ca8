"""A trial of the scripted consumers, and what must have become of each of its messages."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from semel.messaging.handle.claims import ClaimState
from semel.testing.kill import Zygote
from semel.testing.trial import Trial, TrialAudit
from tests.crash import scripted

HANDLERS = {
    "single": {"consumer": "one_by_one", "mode": "transactional"},
    "lanes": {"consumer": "one_by_one", "mode": "transactional", "concurrency": 4},
    "batched": {"consumer": "one_by_one", "mode": "batched"},
    "batch-handler": {"consumer": "all_at_once", "mode": "batched", "relays": False},
    "leased": {"consumer": "under_lease", "mode": "leased"},
}
"""By kind: the scripted consumer and how it is run."""

QUICK_RETRY = {"max_attempts": 8, "initial_delay_seconds": 0.01, "max_delay_seconds": 0.05}
POLICY: dict[str, Any] = {
    "retry": QUICK_RETRY,
    "held_retry_seconds": 0.05,
    "lease_seconds": 0.5,
    # Many scripted failures in a row look like an outage, in which a consumer would stand still.
    "circuit_failures": 0,
}

FINAL = {"poison": ClaimState.FAILED_TERMINAL, "kill": ClaimState.PARKED}


class Scene(Trial):
    """A trial that writes its own messages."""

    def __init__(
        self,
        zygote: Zygote,
        folder: Path,
        kind: str = "single",
        *,
        database: str = "",
        policy: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        handler = {**HANDLERS[kind], **more}
        consumer = f"tests.crash.scripted:{handler.pop('consumer')}"
        super().__init__(
            folder,
            consumer,
            zygote=zygote,
            effects=scripted.EFFECTS,
            receipts="" if kind == "batch-handler" else scripted.RECEIPTS,
            database=database,
            tables=scripted.metadata,
            policy={**POLICY, **(policy or {})},
            **handler,
        )
        self.expected: dict[str, ClaimState] = {}

    def say(self, do: str = "", key: str | None = None, **more: Any) -> str:
        """Send a message that tells its handler what to do; return its id."""
        id = f"m{len(self.expected)}"
        self.put(id, {"do": do, **more}, key)
        self.expected[id] = FINAL.get(do, ClaimState.COMPLETED)
        return id

    def send_mixed(self, number: int, seed: int = 1) -> None:
        """Send messages of all kinds, some of them twice, and records that are none."""
        chance = random.Random(seed)
        for _ in range(number):
            before = len(self.expected)
            do = chance.choices(["", "transient", "poison", "again", "broken"], [12, 3, 1, 3, 1])[0]
            key = chance.choice([None, "a", "b", "c"])
            if do == "again" and before:
                self.put_again(f"m{chance.randrange(before)}")
            elif do == "broken":
                at = self.broker.put(self.topic, b"\xff", None, {"message-id": b"broken"})
                self.expected[f"unreadable:{at}"] = ClaimState.FAILED_TERMINAL
            elif do == "transient":
                self.say("transient", key, times=chance.randint(1, 3))
            else:
                self.say("poison" if do == "poison" else "", key)

    def put_again(self, id: str) -> None:
        """Send a message a second time, as a producer does that missed the answer."""
        for record in self.broker.records(self.topic):
            if record.headers.get("message-id") == id.encode() and record.value != b"\xff":
                self.broker.put(
                    self.topic, record.value, record.key, record.headers, record.at.partition
                )
                return

    def assert_as_expected(self) -> TrialAudit:
        """Fail unless every message is in the state that its script says, with its effect once."""
        return self.assert_clean(self.expected)
