"""Queries of a group that name a row, as bits."""


def members_bits(group: int) -> int:
    """Bits of a row's entry in a list, one for each of the group's queries, 16 at most."""
    return 8 if group <= 8 else 16
