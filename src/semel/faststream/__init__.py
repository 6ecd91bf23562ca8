"""FastStream's Kafka and RabbitMQ brokers, with semel behind their subscribers.

binding        `Semel`: what a service opens, and what it refuses; the subscriber of Kafka
confluent      the subscriber of FastStream's confluent broker, with semel's own consumer
delivery       one message on its way through FastStream, inside a transaction
rabbit         the subscriber of RabbitMQ: claim, handle, commit, then acknowledge
subscription   FastStream's consumer as a member of a group that a runner can use
"""

from semel.errors import require

require("faststream", "faststream")
