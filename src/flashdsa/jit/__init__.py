"""From kernels to callables: ahead of time into one shared object, or in this process."""
