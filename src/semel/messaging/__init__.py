"""One message at a time: claims, the consumer, and what follows a failure."""
