"""From the broker to the handler, and back.

broker    what semel needs of a broker
runner    the loop: fetch, handle, commit, settle
lanes     what may run at once, and what may be committed
offsets   telling the broker, and noting what became of every offset
inbox     storing messages first, and handling them later
crash     finding the message that kills its process
"""
