"""Receives messages from the broker, and settles them after they are handled.

broker    what semel needs of a broker
runner    the loop: fetch, handle, commit, settle
lanes     what may run at once, and what may be committed
offsets   commits offsets to the broker, and records the outcome of each
inbox     stores messages first; its worker is a runner over the table
crash     finds the message that kills its process
"""
