"""A package, so that two folders may each have a test_matmul.py; outside it names of test files must be unique."""
