"""Images of samples: where they are, their sizes, their patches, and their text in a prompt."""
