"""The base of all floors: files, devices, KV cache, trees, sampling, acceptance rules.

It knows no target and no head.
"""
