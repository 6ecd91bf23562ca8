"""Objects in S3, or in a store that speaks S3.

sink        uploads under final keys, completed at commit; then one manifest, put only once
staging     every task attempt uploads parts under keys of its own, with bounded memory
reading     the objects of committed cycles, for pyarrow, Spark and others
store       the calls to the store, and what its errors mean
"""
