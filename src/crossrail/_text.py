"""Formats values for people."""


def plain(text: str, keep: str = "") -> str:
    """Names and details come from peers, and files from anybody: replaces control characters, which a terminal would
    obey, and bytes that are not UTF-8, which streams refuse, by "?". keep: those of them that may stay.
    """
    return "".join(letter if letter.isprintable() or letter in keep else "?" for letter in text)


def rate_text(gb_per_s: float) -> str:
    """A rate such as "3.4 GB/s", "125 MB/s" or "25 kB/s", readable for slow networks too. Powers of 1000."""
    if gb_per_s >= 1:
        return f"{gb_per_s:.1f} GB/s"
    mb_per_s = gb_per_s * 1e3
    if mb_per_s >= 1:
        return f"{mb_per_s:.{0 if mb_per_s >= 10 else 1}f} MB/s"
    return f"{mb_per_s * 1e3:.0f} kB/s"
