"""Frozen weights in 4 and 8 bits: quantized arrays that a matmul accepts, and the formats they come in.

README.md in this folder explains how to add a format.
"""
