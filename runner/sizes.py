"""Bytes as people read them."""

GIB = 2**30


def readable(size: int) -> str:
    """In GiB, below a tenth of one in MiB."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.0f} MiB"
