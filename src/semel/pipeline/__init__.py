"""One batch at a time, under one decision: source ▸ cycle ▸ sink* ▸ ledger.

cycle         the seven steps, and what follows when one of them fails
coordinator   the seven steps over a ledger
twophase      any coordinator, wired to any sinks
driver        runs cycles for one scope, and renews its lease
recovery      settle what earlier owners left open
states        the life of one attempt
ledger        the protocol of the ledger; rules: what every ledger refuses
sink          the protocol of a sink
source        what a batch read; positions: what may follow it
generation    which checkpoint is in use; adopt: an operator changes it
txn           the names: scope, cycle, transaction
"""
