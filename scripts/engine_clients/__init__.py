"""Engines that serve exported drafters: one client a file, and tiny heads to serve."""

import helpers  # noqa: F401  # makes the clone's own packages importable
