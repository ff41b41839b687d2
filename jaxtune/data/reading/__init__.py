"""Samples from files, folders, the hub, Python objects and user functions."""
