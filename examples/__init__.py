"""Programs that begin where the operations end: whole recipes, run as `python -m examples.NAME`."""
