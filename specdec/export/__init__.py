"""Formats of exports, one file each, with `form(drafter) -> specdec.export.serving.Form`."""
