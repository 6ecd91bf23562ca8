"""What happens after a failed attempt: retry, park or dead-letter.

attempt_failed  write a failed attempt, and what becomes of its message, in one transaction
waiting         the waiting table: messages that wait for a retry, a person or their key
deadletters     durable, owned, replayable records of messages that were given up
retrytopic      the retry topic: a message travels to its next attempt as a record of Kafka
retries         the worker that handles waiting messages when they are due
"""
