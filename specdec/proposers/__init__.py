"""Proposers: trained drafters and methods without training, which put trees of drafts before the target."""
