"""Packages, so that two rooms may each have a test_matmul.py; elsewhere names of test files have to be unique."""
