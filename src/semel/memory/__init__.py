"""Implementations in the memory of one process: products, under the same contracts.

broker           a broker that behaves like Kafka; broker_store keeps its logs,
                 broker_groups its consumer groups, broker_failures makes its calls fail
sink             a sink in memory, the reference implementation of the contract
ledger           the ledger of one process
"""
