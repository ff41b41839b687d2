"""Images of samples: where they are, their sizes, their patches, and the text that stands for them in a prompt."""
