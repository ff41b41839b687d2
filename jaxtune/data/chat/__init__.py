"""Messages to tokens: templates rendered in a sandbox, the turns in a rendered text, and which tokens are trained."""
