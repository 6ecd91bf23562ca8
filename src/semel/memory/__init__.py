"""Implementations in one process's memory: products of their own, under the same contracts."""
