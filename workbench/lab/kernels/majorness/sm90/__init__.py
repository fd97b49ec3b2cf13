"""The majorness study with wgmma."""
