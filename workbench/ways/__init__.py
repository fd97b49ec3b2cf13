"""What each way of an operation earns: all are timed, the choice is replayed without each."""
