"""A payments stream through Spark, killed three times, and counted: `python -m examples.demo`."""
