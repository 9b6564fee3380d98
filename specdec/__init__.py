"""Drafters for speculative decoding: train, decode, measure. This package is what loads a checkpoint."""

from specdec.core import threads

__version__ = "0.1.0"

threads.limit_spinning()
