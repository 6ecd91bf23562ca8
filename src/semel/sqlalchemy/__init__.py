"""The messaging half's stores in PostgreSQL and SQLite, by SQLAlchemy.

MySQL and MariaDB have other statements, and are not supported.
"""
