"""Serving layouts: one file each, with `export(drafter, source, out, *, dtype) -> tensors`."""
