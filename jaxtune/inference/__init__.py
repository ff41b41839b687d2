"""Text from a model: `decode` computes a token, `generation` a text, `answers` of prompts; `sampling` has options."""
