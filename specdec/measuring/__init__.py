"""Measurement: acceptance length, speedup, losslessness, and their reports."""
