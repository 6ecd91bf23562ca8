"""Kafka, by confluent-kafka: a broker of the messaging half, codecs, and a sink of the pipelines.

broker         `KafkaBroker`: what a service opens; its publisher and its reader
subscription   one member of a consumer group, on a thread of its own
client         settings of the client, and what its errors mean
sink           `KafkaSink`: the records of a cycle, in one decision with other sinks
slots          its transactional producers, and the proof of what each has sent
staging        its shards: what a cycle sends, kept in a shared place until the decision
codecs         Avro, Protobuf and JSON Schema, with the schemas of a registry
"""
