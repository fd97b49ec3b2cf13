"""The torch backend: plain torch on any device, which reads no value on the host.

It is the CPU's code in another mode: tiles are larger, tables are looked at as wide as they are,
and what is outside counts as not there; FLASHDSA_CHECK=1 makes it an error, for which the device is
waited for.
"""
