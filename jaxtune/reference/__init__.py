"""What describes all options: pages of the documentation, and a JSON Schema for editors."""
