"""The model that a config declares, and the values of its parameters: `architecture` (config.json to ModelSpec),
`model` (which parameters there are, how each is treated), `values` (read from files or drawn).
"""
