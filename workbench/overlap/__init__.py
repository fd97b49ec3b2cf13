"""Rows that neighbouring queries of one batch share."""
