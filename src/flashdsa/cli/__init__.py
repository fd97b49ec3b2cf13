"""The command line: one file per command; everything heavy is imported inside the commands."""
