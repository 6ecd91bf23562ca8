"""Arrow batches: the format in which rows travel to every sink.

tally     a row count and a hash of whole batches that does not depend on their order
changes   message changes as batches, for their sink
formats   rows as Parquet, JSON lines or CSV, written as streams and read back
rowfiles  the open files of a task: the next one at a target size, one per Hive-style folder
area      a place that the driver and all executors share, where rows wait for the decision
held      a sink over something that cannot hold rows: they wait in a shared place
callback  a function of yours that gets the rows of a cycle after its decision
attempts  what a table sink keeps beside its table: data files and records, by attempt
tables    the flow of a sink over a table with atomic commits, for Iceberg and Delta
"""
