"""The model that a config declares, and the values of its parameters: `architecture` (config.json to ModelSpec),
`base` (what the folder of the base model describes), `model` (which parameters there are, how each is treated),
`mesh_fit` (whether they fit the mesh), `values` (read from files or drawn).
"""
