"""dQ and dKV of 64 rows at a time in one kernel."""
