"""What neighbouring queries of one batch share."""
