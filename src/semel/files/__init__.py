"""Parquet and JSON-lines files on a local or shared file system.

sink        one folder per cycle, which appears whole, by one rename
staging     the executor's side: every task attempt writes into a folder of its own
collecting  prepare: the files of the winning tasks, checked, in one sealed folder
layout      which folder holds what
formats     rows as Parquet or JSON lines, with bounded memory
jsonl       the JSON lines, written and read
disk        the operations on a file system, each durable when it returns
"""
