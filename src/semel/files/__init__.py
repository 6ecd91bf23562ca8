"""Parquet and JSON-lines files on a local or shared file system.

sink        one folder per cycle, which appears whole, by one rename
staging     every task attempt writes into a folder of its own; prepare collects the winners
layout      which folder holds what
formats     rows as Parquet or JSON lines, written and read
disk        the operations on a file system, each durable when it returns
"""
