"""Judge a backend: cases, comparison with the float64 reference, and the CLI's checks."""
