"""Implementations in the memory of one process: products, under the same contracts.

broker           a broker that behaves like Kafka, and the same in a file; broker_groups has
                 the rules of its consumer groups, broker_store keeps groups and logs
sink             a sink in memory, the reference implementation of the contract
ledger           the ledger of one process
"""
