"""Rows to a service by HTTP, and the reference of such a service.

sink        chunks are sent by tasks; prepare, commit and abort are one request each
posts       the fallback: rows wait in a shared place, and are posted after the decision
client      the requests, their repetition, and what each answer means: one table
receiver    an ASGI application that keeps the contract, for Starlette and FastAPI
openapi     the protocol as a document, for receivers in other languages
store       what the receiver remembers, in SQLite or PostgreSQL
"""
