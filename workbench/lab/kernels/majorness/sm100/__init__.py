"""The majorness study with tcgen05.mma."""
