"""The ledger in SQL: statements written once, for SQLite and PostgreSQL.

ledger      the ledger over any database
statements  every statement, each with a sentence
schema      the tables
database    one connection, its transactions, and what their failures mean
sqlite      the ledger in one SQLite file, the default
"""
