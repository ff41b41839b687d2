"""Descriptions of all options: pages of the documentation, and a JSON Schema for editors."""
