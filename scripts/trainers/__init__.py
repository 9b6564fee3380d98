"""The training programs that scripts/compare_training.py runs, each in a process of its own."""
