"""The golden record."""
