"""Text from a model: `generation` decodes, `answers` continues prompts, `sampling` has the options of both."""
