"""What several sinks do with Arrow batches."""
