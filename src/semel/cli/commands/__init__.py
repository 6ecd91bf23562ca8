"""The commands: each asks for a report and shows it as tables."""
