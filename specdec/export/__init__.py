"""Serving formats: one file each, with `form(drafter) -> specdec.serving.Form`."""
