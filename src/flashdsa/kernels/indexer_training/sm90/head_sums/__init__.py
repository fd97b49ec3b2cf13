"""The attention's target: exponentials summed over heads at the slots of each query."""
