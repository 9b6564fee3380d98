"""The measurements of `make gpu` (benchmarks/gpu_report.py), by subject."""
