"""Serving layouts: one file each."""
