"""ptxemu in a GPU's place: the only part of the backends that knows the emulator."""
