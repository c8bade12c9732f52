"""Request traces and logs: readers of many formats, and what they say about the reuse of prefixes.

``request`` is what every reader yields, ``tree`` finds what a request shares with earlier ones, ``reuse``
keeps that in a compact form, ``policies`` and ``findings`` compute from it. Only ``source`` touches files.
"""
