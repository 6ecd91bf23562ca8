"""Parquet, JSON-lines and CSV files on a local or shared file system.

sink        one folder per cycle, which appears whole, by one rename
staging     every task attempt writes into a folder of its own; prepare collects the winners
layout      which folder holds what
disk        the operations on a file system, each durable when it returns
"""
