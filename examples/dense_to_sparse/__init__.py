"""From a dense checkpoint to a sparse one: DeepSeek-V3.2's recipe on one machine."""
