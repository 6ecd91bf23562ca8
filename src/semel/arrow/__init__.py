"""Arrow batches: the format in which rows travel to every sink.

tally     a row count and a hash of whole batches that does not depend on their order
"""
