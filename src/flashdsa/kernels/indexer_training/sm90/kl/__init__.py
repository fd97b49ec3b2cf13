"""The divergence of each row's target from the softmax of its scores, and its gradient."""
