"""A FastStream service on Kafka, killed and counted: `python -m examples.service_demo`."""
