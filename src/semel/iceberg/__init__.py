"""Apache Iceberg tables, by pyiceberg.

sink        one snapshot per cycle, with the mark in a table property
replacing   what a write removes: the rows that have its keys, or whole partitions
staging     every task writes data files into a folder of its attempt's own
"""
