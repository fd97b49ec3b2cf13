"""The sinks' gradient."""
