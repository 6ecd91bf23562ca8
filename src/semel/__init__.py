"""The effect of a message, once."""
