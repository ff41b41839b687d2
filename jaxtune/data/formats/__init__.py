"""Samples to documents: which columns each type reads, and how they become messages or text."""
