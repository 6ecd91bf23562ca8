"""One batch at a time, under one decision: source ▸ cycle ▸ sink* ▸ ledger.

cycle         the seven steps, and what follows when one of them fails
twophase      any coordinator, wired to any sinks
driver        runs cycles for one scope over a ledger, and renews its lease
recovery      settle what earlier owners left open
ledger        the protocol of the ledger, and the life of one attempt
rules         what every ledger refuses
sink          the protocol of a sink
source        what a batch read, and what may follow it
generation    which checkpoint is in use, and how an operator adopts another
txn           the names: scope, cycle, transaction
"""
