"""After a failed attempt.

attempt_failed  write a failed attempt in one transaction, whatever becomes of the message
waiting         the table of messages that wait: for a retry, for a person, behind their key
deadletters     durable, owned, replayable records of what was given up
retries         the worker that handles what is due
"""
