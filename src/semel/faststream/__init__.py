"""FastStream's Kafka and RabbitMQ brokers, with semel behind their subscribers.

binding        `Semel`: what a service opens, and what it refuses
delivery       one message on its way through FastStream, inside a transaction
aiokafka       Kafka: FastStream's consumer as a member of a group that a runner can use
confluent      Kafka, by FastStream's confluent broker: semel's own consumer fetches
rabbit         RabbitMQ: claim, handle, commit, then acknowledge
"""

from semel.errors import require

require("faststream", "faststream")
