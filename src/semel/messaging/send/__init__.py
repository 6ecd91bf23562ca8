"""Sending messages.

outbox    entries that become durable with the caller's transaction
relay     the one leader that publishes them to the broker, in order per key
publish   one batch: which entries may be sent, and what the broker's answers mean
"""
