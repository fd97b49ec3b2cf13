"""The judge of ways: all of a call are timed, and the choice is replayed without each kind."""
