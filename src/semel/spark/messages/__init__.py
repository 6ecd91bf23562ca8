"""Messages on Spark: a policy and a handler, one decision per batch.

pipeline   `MessagePipeline`: what a user makes, and what runs for every batch
handling   the pass: decode, deduplicate, order, handle, route; without Spark
columns    ordinary messages whose rows Spark makes: the same as the pass, by columns
frames     the batch as the pass needs it, and the pass as a task runs it
wakeup     the source that wakes an idle query
"""
