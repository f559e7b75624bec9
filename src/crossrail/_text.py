"""Text for people."""


def plain(text: str, keep: str = "") -> str:
    """Names and details come from peers, and a file from anybody: "?" for control characters, which a terminal would
    obey, and for bytes that are no UTF-8, which streams refuse. keep: which of them may stay.
    """
    return "".join(letter if letter.isprintable() or letter in keep else "?" for letter in text)
