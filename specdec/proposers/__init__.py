"""Whatever puts a draft tree before the target."""
