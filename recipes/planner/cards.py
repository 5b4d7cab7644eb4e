"""Network cards as people write them."""

import re


def network_cards(text: str) -> tuple[int, float]:
    """Reads how many cards a node has and the Gbit/s of each, such as 2x100, or 100 for one.

    Raises:
        ValueError: if it is neither.
    """
    found = re.fullmatch(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)", text.strip())
    count, rate = (int(found[1] or 1), float(found[2])) if found else (0, 0.0)
    if not (count and rate):
        raise ValueError(f"nic must be cards x Gbit/s, such as 2x100, got {text!r}")
    return count, rate
