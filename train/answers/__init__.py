"""Answers of the target to prompts: for training, and for replay."""
