"""Which of a Cluster's 16384 slots a key belongs to.

CRC16-XMODEM modulo 16384 (Valkey Cluster specification, "Key distribution model"). kvferry's keys hold no
braces, so that the hash tag rule never applies and the stripes of a part spread over all shards.
"""

import binascii

SLOTS = 16384


def key_slot(key: bytes) -> int:
    """The slot of a key that contains no hash tag."""
    return binascii.crc_hqx(key, 0) % SLOTS
