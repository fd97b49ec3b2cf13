"""Who runs next: warps and asynchronous steps in a seeded order; and deadlocks."""
