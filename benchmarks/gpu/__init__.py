"""The pieces of `benchmarks/gpu_suite.py`, one a module, each run in processes of its own."""
