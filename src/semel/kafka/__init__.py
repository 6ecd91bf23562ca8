"""Kafka, by confluent-kafka: a broker of the messaging half, and codecs.

broker         `KafkaBroker`: what a service opens; its publisher and its reader
subscription   one member of a consumer group, on a thread of its own
client         settings of the client, and what its errors mean
codecs         Avro, Protobuf and JSON Schema, with the schemas of a registry
"""
