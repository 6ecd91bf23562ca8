"""Parquet and JSON-lines files on a local or shared file system."""
