"""Text from a model: `decode` computes a token, `generation` a text, `answers` continues prompts, `sampling` has the options of both."""
