"""How fast semel is beside what people do without it, measured in one run."""
