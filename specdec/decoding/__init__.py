"""The decoder: batches of rows that draft and verify round by round."""
