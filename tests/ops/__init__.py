"""Tests of the custom ops and the public functions' argument rules."""
