"""Messages that leave.

outbox    entries that become durable with the caller's transaction
relay     the one leader that takes them to the broker, in order per key
publish   one batch: what may go, what the broker's answers mean, what it refuses
"""
