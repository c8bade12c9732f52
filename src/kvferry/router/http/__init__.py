"""The proxy: HTTP/1.1 on transports, the bytes of an answer passed on as they came."""
