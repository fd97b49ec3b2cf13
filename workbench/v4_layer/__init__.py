"""An attention layer of DeepSeek-V4-Flash, forward and backward: time by part, beside torch's."""
