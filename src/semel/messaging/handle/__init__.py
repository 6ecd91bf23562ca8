"""One message or one batch: claim, handle, commit.

claims    the durable "this consumer takes this message", as a table of answers
attempt   one message, one transaction
batch     many messages in one transaction, with the outcome of one each
lease     the other mode: commit the claim first, then take as long as it needs
versions  which version of an aggregate may be applied
cancel    cancellations: whose they are, and how work ends
"""
