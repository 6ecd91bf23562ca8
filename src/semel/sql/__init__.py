"""The messaging half's stores in PostgreSQL and SQLite, by SQLAlchemy.

MySQL and MariaDB have other statements, and are not supported.
"""

from semel.errors import require

# Whoever uses one of these modules is told which extra to install.
require("sqlalchemy", "sqlalchemy")
