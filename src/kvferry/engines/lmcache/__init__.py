"""An L2 adapter for LMCache, so that a fleet that runs it stores in kvferry's Valkey tier.

``adapter`` is what LMCache loads; the other modules import neither LMCache nor torch.
"""
