"""Arrow batches: the format in which rows travel to every sink.

columns   one 64-bit hash per value of a column
tally     a row count and a hash of whole batches that does not depend on their order
"""
