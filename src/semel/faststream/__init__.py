"""FastStream's Kafka broker, with semel's runner behind its subscribers.

binding        `Semel`: what a service opens, and what it refuses
subscriber     FastStream's subscriber, which starts the runner and handles one message at a time
subscription   FastStream's consumer as a member of a group that a runner can use
"""

from semel.errors import require

require("faststream", "faststream")
