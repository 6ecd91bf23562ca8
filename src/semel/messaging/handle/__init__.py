"""Handles one message or one batch: claim, handle, commit.

claims    the claim of a message by a consumer: its states and its answers
attempt   one message in one transaction
batch     many messages in one transaction, with the outcomes of one transaction each
lease     leased mode: commit the claim first, then handle without a time limit
thread    handlers that are plain functions
cancel    who cancelled a task, and how to end tasks
"""
