"""Parts of the Blackwell attention kernels: a pair's tile of keys, and the slots that name rows."""
