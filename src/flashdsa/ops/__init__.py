"""The operations as torch custom ops: argument checks, fake implementations, autograd."""
