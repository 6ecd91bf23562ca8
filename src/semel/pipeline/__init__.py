"""One batch at a time: source → cycle → sinks → ledger, under one decision."""
