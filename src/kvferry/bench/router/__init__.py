"""``kvferry bench router``: what the router costs and what its choice is worth, beside vllm-router's."""
