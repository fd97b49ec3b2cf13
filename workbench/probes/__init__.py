"""Programs that ask hardware or a model one question."""
