"""ptxemu as a GPU: the only part of the backends that knows the emulator."""
