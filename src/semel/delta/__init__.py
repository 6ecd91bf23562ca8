"""Delta Lake tables, by deltalake (delta-rs), without jars.

sink        one version of the table per cycle, with the proof in its application transactions
staging     every task writes data files into a folder of its attempt's own
"""
