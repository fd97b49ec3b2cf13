"""Small calls: a kernel's name -> calls of it that are quick to wait for, with their judges."""
