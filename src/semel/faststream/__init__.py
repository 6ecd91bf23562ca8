"""FastStream's Kafka broker, with semel's runner behind its subscribers.

binding        `Semel`: what a service opens, and what it refuses; FastStream's subscriber
subscription   FastStream's consumer as a member of a group that a runner can use
"""

from semel.errors import require

require("faststream", "faststream")
