"""Text for people."""


def plain(text: str) -> str:
    """Names and details come from peers, and a file from anybody: a terminal must not obey them."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
