"""Drafters for speculative decoding: train, decode, measure. This package is what loads a checkpoint."""

__version__ = "0.1.0"
