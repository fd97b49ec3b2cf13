"""The torch backend: plain torch on any device, which reads no value on the host.

Attention, training and compressed entries are the CPU's code; what the CPU does row by row, as long
as lengths say, is here done for all rows, as wide as tables are. What is outside counts as not
there; FLASHDSA_CHECK=1 makes it an error, for which the device is waited for.
"""
